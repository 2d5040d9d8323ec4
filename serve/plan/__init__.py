"""What a deployment of rules costs, before there is one: time, memory, devices, dollars."""
