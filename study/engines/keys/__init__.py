"""The table of what each key, flag and variable of accelerate and DeepSpeed does, read without importing either."""
