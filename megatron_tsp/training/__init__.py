"""What the entries share: command line to process groups to model, data, and `pretrain`."""
