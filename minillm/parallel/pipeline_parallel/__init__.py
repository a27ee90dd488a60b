"""Pipeline parallelism: layers are dealt out, microbatches move through them."""
