"""The vocabulary every stage speaks: rule, recipe, example, prompt, verdict, card, layout.

Knows nothing of torch, vLLM, training or serving. Everything here is a value or a pure function
over values and files.
"""

import logging

# PEFT imports bitsandbytes, which then warns that a faster kernel could be fetched from a hub.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
