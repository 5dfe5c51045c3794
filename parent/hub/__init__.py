"""Models from the Hugging Face Hub: what is fetched, how it is checked, when it becomes a model here."""
