"""The state of a training program as a JSON document and named arrays, and the shards that hold them."""
