"""The story that Tiphys is for: four steps, and everything that can go wrong while the third one trains.

The same pipeline and the same disturbances run on the local engine and on a
cluster with Argo Workflows, so that neither can promise what the other does not
keep.
"""
