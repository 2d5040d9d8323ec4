"""What a logit is worth: scales, thresholds and metrics from the validation split."""
