"""The operations of a gated step (admit, settle, conclude, finalize) and the records they write."""
