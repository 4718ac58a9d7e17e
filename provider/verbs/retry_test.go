package verbs

// In tests there is no failover of the network, and each message finds a receive buffer.
func init() { defaultAckTimeout, rnrRetry = 17, 0 }
