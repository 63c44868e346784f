"""Pipeline parallelism: stages that run the model's own forward, and the schedule between them."""
