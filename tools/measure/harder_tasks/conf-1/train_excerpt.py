args = TrainingArguments(
    output_dir="out",
    deepspeed="ds.json",
    bf16=True,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=4,
    max_steps=1000,
    learning_rate=2e-4,
    lr_scheduler_type="cosine",
    warmup_steps=100,
    weight_decay=0.1,
    adam_beta2=0.95,
    max_grad_norm=0.5,
    logging_steps=10,
)
trainer = Trainer(model=model, args=args, train_dataset=train_set)  # model: a Llama of 1.2 billion parameters
trainer.train()
