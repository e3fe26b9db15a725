"""The one knowledge base: what each key, flag and variable of accelerate and DeepSpeed does, read without either."""
