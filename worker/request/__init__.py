"""From a validated request to a plan: what this request means for this model."""
