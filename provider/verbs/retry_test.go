package verbs

// In tests a network does not fail over, and each message has its receive.
func init() { defaultAckTimeout, rnrRetry = 17, 0 }
