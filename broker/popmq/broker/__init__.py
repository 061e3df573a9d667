"""The broker: stores, delivers, delays and replicates messages."""
