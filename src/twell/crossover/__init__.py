"""Where sparse stops paying: limits that were measured, on GPUs (`gpu`) and on this CPU (`cpu`)."""
