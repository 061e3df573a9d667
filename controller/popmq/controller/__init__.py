"""The controller: who is master, epochs, the SyncStateSet and routes."""
