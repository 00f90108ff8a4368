"""What people would rather look at: plots of measured results."""
