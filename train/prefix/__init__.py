"""aLoRAs on cached prefixes: many at once, a conversation's keys and values computed once."""
