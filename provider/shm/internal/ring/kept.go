package ring

// keptMessages are the kept messages, oldest first. A message in the ring takes four bytes here, and
// four more if a control message or a pad that was not kept lies before it. The shortest record takes
// 16 bytes. So all kept messages take at most a quarter of the ring's memory.
type keptMessages struct {
	count  int      // messages
	at     uint64   // position of the oldest message's record
	end    uint64   // position after the newest message's record
	steps  []uint32 // circular; its length is a power of two
	first  int      // index in steps of the oldest message
	used   int      // number of steps in use
	copies [][]byte // messages that came in cells, oldest first
}

// A step is the size of a message, stepCopy, or stepGap with the distance between two messages in words
// of 8 bytes.
const (
	stepGap  = 1 << 31
	stepCopy = 1 << 30
)

// stepsIdle is the most steps for which memory is kept when no message is.
const stepsIdle = 1 << 10

// push adds a message whose record is at a position.
func (k *keptMessages) push(at uint64, size int) {
	k.reach(at)
	k.step(uint32(size))
	k.end = at + recordSize(size)
}

// pushCopy adds a message from a cell. It lies between the records around a position.
func (k *keptMessages) pushCopy(at uint64, msg []byte) {
	k.reach(at)
	k.step(stepCopy)
	k.copies = append(k.copies, msg)
	k.end = at
}

// reach adds the gap between the newest message and the next one, if there is any, and counts the next
// one.
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

// front returns the size of the oldest message, or its copy if it came in a cell. There must be a
// message.
func (k *keptMessages) front() (size int, spare []byte) {
	if s := k.steps[k.first]; s != stepCopy {
		return int(s), nil
	}
	return 0, k.copies[0]
}

// pop removes the oldest message. There must be one.
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
