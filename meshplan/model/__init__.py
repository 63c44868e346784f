"""What a model is, without torch: modules, tensors, the operations of a forward, dims, stages."""
