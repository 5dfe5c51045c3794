"""What parent and worker both need to know of a mixture of experts that is streamed from disk: what a folder
holds (artifact), what it takes (plan), how fast it may be (forecast). Pure but for reading headers."""
