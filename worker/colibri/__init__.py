"""The runtime that reads experts from disk as they are needed: sources, reader, slabs, the streamed layer,
GLM-5.2's own architecture, its draft layer and the converter."""
