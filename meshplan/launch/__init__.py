"""Starting the ranks of a job: variables of launchers, torchrun's command, sbatch scripts."""
