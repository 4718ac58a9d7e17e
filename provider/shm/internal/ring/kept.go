package ring

// keptMessages are the messages that are kept, oldest first. A message in the ring takes
// four bytes, and four more if something behind the one before it was not kept: a control
// message, or a pad. So all of them take a quarter of the ring's memory at most, as the
// shortest record takes 16 bytes.
type keptMessages struct {
	count  int      // messages
	at     uint64   // position of the oldest one's record
	end    uint64   // position behind the newest one's record
	steps  []uint32 // circular; its length is a power of two
	first  int      // index in steps of the oldest message's
	used   int      // length of what is used of steps
	copies [][]byte // messages that came by cells, oldest first
}

// A step is the size of a message, stepCopy, or the distance, in words of 8 bytes, between
// two messages.
const (
	stepGap  = 1 << 31
	stepCopy = 1 << 30
)

// stepsIdle is how many steps there is room for when nothing is kept.
const stepsIdle = 1 << 10

// push adds a message whose record is at a position.
func (k *keptMessages) push(at uint64, size int) {
	k.reach(at)
	k.step(uint32(size))
	k.end = at + recordSize(size)
}

// pushCopy adds a message that is not in the ring, between the records around a position.
func (k *keptMessages) pushCopy(at uint64, msg []byte) {
	k.reach(at)
	k.step(stepCopy)
	k.copies = append(k.copies, msg)
	k.end = at
}

// reach notes the way from the newest message's end to the next one, and counts that.
func (k *keptMessages) reach(at uint64) {
	if k.count == 0 {
		k.at = at
	} else if at != k.end {
		k.step(stepGap | uint32((at-k.end)/8))
	}
	k.count++
}

func (k *keptMessages) step(s uint32) {
	if k.used == len(k.steps) {
		grown := make([]uint32, max(16, 2*len(k.steps)))
		n := copy(grown, k.steps[k.first:])
		copy(grown[n:], k.steps[:k.first])
		k.steps, k.first = grown, 0
	}
	k.steps[(k.first+k.used)&(len(k.steps)-1)] = s
	k.used++
}

// front returns the oldest message's size, or its copy. There is one.
func (k *keptMessages) front() (size int, spare []byte) {
	if s := k.steps[k.first]; s != stepCopy {
		return int(s), nil
	}
	return 0, k.copies[0]
}

// pop removes the oldest message. There is one.
func (k *keptMessages) pop() {
	if s := k.steps[k.first]; s != stepCopy {
		k.at += recordSize(int(s))
	} else {
		k.copies[0] = nil
		k.copies = k.copies[1:]
	}
	k.count--
	k.next()
	if k.count == 0 {
		k.first, k.copies = 0, nil
		if len(k.steps) > stepsIdle {
			k.steps = nil
		}
	} else if s := k.steps[k.first]; s&stepGap != 0 {
		k.at += uint64(s&^stepGap) * 8
		k.next()
	}
}

func (k *keptMessages) next() {
	k.first = (k.first + 1) & (len(k.steps) - 1)
	k.used--
}
