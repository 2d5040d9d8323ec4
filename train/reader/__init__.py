"""The reader: one aLoRA with a head that judges any rule by its words."""
