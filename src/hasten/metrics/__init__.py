"""Task metrics and the statistics that compare them."""
