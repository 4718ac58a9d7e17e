package session

import (
	"cmp"

	"github.com/sanconn/san/session/internal/wire"
)

// terms is how bytes go to the peer, as Negotiate has determined it from both ends. It is not written
// again, so it needs no lock. Write decides by it between a copy and an offer, and sender.trySend
// between a message and the send buffer.
type terms struct {
	maxMsg    int // bytes of a message
	maxRDMA   int // … of an RDMA write
	maxExpose int // … of one offer

	whole int // the largest Write that goes in one message: it is too small for an offer and for the send buffer

	threshold    int  // the smallest Write whose memory is offered; 0: none
	bufferMayPay bool // … except those for which the send buffer is better: Memory.PaysToOffer
	bufferFrom   int  // the smallest Write that goes through the send buffer; 0: none
	bufferAfter  int  // bytes of such Writes until an inbox is requested
	bufferSize   int  // of the send buffer, unless memory is short
}

func newTerms(cfg *Config, lim *Limits, peer wire.Params) terms {
	p := terms{maxMsg: int(min(uint32(lim.MaxMessage), peer.MaxMessage)), maxRDMA: lim.MaxRDMA, maxExpose: lim.MaxExpose}
	off := cfg.Disable
	from := cmp.Or(cfg.Threshold, lim.Threshold)
	if from > 0 && lim.MaxExpose > 0 && peer.Caps&wire.CapRead != 0 && off&FeatureRDMARead == 0 {
		p.threshold = max(from, minOffer)
	}
	byWrite := lim.CanWrite && peer.Caps&wire.CapInbox != 0 && off&FeatureRDMAWrite == 0
	if size := bufferSize(lim, cfg.SendBudget); byWrite && lim.Inbox > 0 && size > 0 {
		p.bufferFrom, p.bufferAfter, p.bufferSize = lim.Inbox, max(lim.InboxAfter, 1), size
		p.bufferMayPay = cfg.Threshold == 0
	}
	p.whole = p.maxMsg - wire.HeaderLen
	for _, from := range []int{p.threshold, p.bufferFrom} {
		if from > 0 {
			p.whole = min(p.whole, from-1)
		}
	}
	return p
}

// large reports whether n bytes of a Write are enough to be offered.
func (p *terms) large(n int) bool { return p.threshold > 0 && n >= p.threshold }

// toExpose splits b, from a Write: first bytes go in the message of the offer, and rest is offered, as
// much as one exposure takes.
func (p *terms) toExpose(b []byte) (first int, rest []byte) {
	if n := min(offerInline, p.maxMsg-wire.OfferReadLen); n < len(b) {
		first = n
	}
	return first, b[first:][:min(len(b)-first, p.maxExpose)]
}

// bounds are what this end takes from the peer, from the beginning on.
type bounds struct {
	caps    uint32 // capabilities to announce
	maxRDMA int    // bytes of an RDMA read
	budget  int    // bytes that are fetched ahead of any Read
	inbox   int    // … of an inbox, unless memory is short; 0: no inbox is opened
	weigh   bool   // read into a Read's slice only if that pays: Memory.PaysToFill
}

func newBounds(cfg *Config, lim *Limits) bounds {
	b := bounds{maxRDMA: lim.MaxRDMA, budget: cfg.ReceiveBudget, weigh: cfg.Threshold == 0}
	if lim.CanRead && cfg.Disable&FeatureRDMARead == 0 {
		b.caps |= wire.CapRead
	}
	if lim.MaxExpose > 0 && cfg.Disable&FeatureRDMAWrite == 0 {
		b.caps |= wire.CapInbox
		b.inbox = bufferSize(lim, cfg.ReceiveBudget)
	}
	return b
}
