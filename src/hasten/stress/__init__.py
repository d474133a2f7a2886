"""Open-loop load generation: requests are sent on schedule, whether or not earlier ones were answered."""
