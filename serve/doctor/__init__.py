"""`make doctor`: what is installed, what runs here, and each problem with its remedy."""
