"""A model without torch: modules, tensors, the operations of a forward, dims, stages."""
