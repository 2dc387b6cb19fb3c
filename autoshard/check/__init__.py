"""Whether parameters may be cut and batches divided, found op by op."""
