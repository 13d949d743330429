"""Models from where they live: modules of torch, and folders of Hugging Face's transformers."""
