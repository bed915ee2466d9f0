"""How a run proceeds, as pure state machines: a state and an event give the next state."""
