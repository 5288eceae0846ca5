"""The operations of a gated step (admit, settle, conclude, finalize) and what they write."""
