"""The prompt cache: records of a prefix's keys and values, in memory and on disk."""
