"""Readers, one per data source. They turn files into checked tensors and know neither tasks nor where to look."""
