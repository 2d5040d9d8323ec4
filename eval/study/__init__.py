"""What the points of a study say: AUROC on the same test rows, differences, one picture."""
