"""From a request to its prompt's text: what a model is shown, and in which forms it answers. Pure."""
