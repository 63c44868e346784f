"""What all decisions share: values, how rules override one another, dims that can be cut."""
