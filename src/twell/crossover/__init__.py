"""Measured limits: up to which share of active neurons sparse pays, on GPUs (`gpu`) and this CPU (`cpu`)."""
