package verbs

// How long a connection bears a network that delivers nothing. The figures are those of
// InfiniBand (IBTA 9.7.6.1.3) and RoCE; on iWARP TCP retransmits.

// Variables, as tests are to find the dead at once, and receives that are missing.
var (
	// defaultAckTimeout is 4.096 µs × 2¹⁹ = 2.1 s to an acknowledgement; a device may take up to
	// four times as long. With retryCount, a connection outlives 17 to 70 s without a path,
	// which is what a subnet manager or a bond takes to find another. TCP waits for minutes.
	// A peer that is dead while nothing is under way is found by the session's keepalive.
	defaultAckTimeout uint8 = 19

	// rnrRetry is how often a message is sent again for which no receive was posted. By the
	// session's credits one always is; but a device may be late to see what was posted.
	rnrRetry uint8 = 6
)

const (
	// rnrTimer is the code of the time between such attempts, 0.64 ms (IBTA 9.7.5.2.8):
	// rdma_cm leaves it at 0, which means 655 ms.
	rnrTimer = 12

	// The most that the fields take.
	retryCount      = 7
	maxAckTimeout   = 31
	maxServiceLevel = 15
)

// retries is how often the device repeats what is not acknowledged.
func (d *device) retries() uint8 {
	if d.rxe() {
		return retryCount - 1 // 7 is for ever there (sw/rxe/rxe_comp.c, as for RNR)
	}
	return retryCount
}
