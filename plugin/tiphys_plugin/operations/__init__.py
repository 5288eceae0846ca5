"""The operations of a gated step (admit, conclude, finalize) and the records they write."""
