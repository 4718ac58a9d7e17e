package main

import (
	"fmt"
	"time"
)

// Bounds of what a client may request from a server.
const (
	maxSize    = 1 << 28 // of a message, which a stream holds in memory, or of a Read
	maxStreams = 4096
	maxMemory  = 4 << 30 // for all streams' messages and reads
	maxTime    = 24 * time.Hour
)

// defaultRead is the room of a Read, whatever the size of messages. Most programs read so; io.Copy uses
// half of it.
const defaultRead = byteSize(64 << 10)

// A mode is what one side does on each connection.
type mode string

const (
	modeSend    mode = "send"
	modeReceive mode = "receive"
	modeBoth    mode = "both" // sends and receives at once
	modePing    mode = "ping" // repeats: sends one message, waits for its echo
	modeEcho    mode = "echo"
)

// mirror returns the mode of the other side.
func (m mode) mirror() mode {
	switch m {
	case modeSend:
		return modeReceive
	case modeReceive:
		return modeSend
	case modePing:
		return modeEcho
	case modeEcho:
		return modePing
	}
	return m
}

// A spec describes a measurement, as the client sends it to the server.
type spec struct {
	Mode    mode    `json:"mode"` // of the client
	Size    int     `json:"size"` // bytes per message, that is, per Write
	Read    int     `json:"read"` // bytes that a Read of a stream has room for
	Streams int     `json:"streams"`
	Warmup  float64 `json:"warmup_s"` // seconds before the measured ones
	Time    float64 `json:"time_s"`   // seconds to measure
	Verify  bool    `json:"verify"`   // check each byte, not a sample
}

// check refuses measurements beyond the bounds of this process.
func (s spec) check() error {
	switch s.Mode {
	case modeSend, modeReceive, modeBoth, modePing:
	default:
		return fmt.Errorf("unknown mode %q", s.Mode)
	}
	if s.Size < 1 || s.Size > maxSize {
		return fmt.Errorf("message size %d is outside 1 to %d", s.Size, maxSize)
	}
	if s.Read < 1 || s.Read > maxSize {
		return fmt.Errorf("read size %d is outside 1 to %d", s.Read, maxSize)
	}
	if s.Streams < 1 || s.Streams > maxStreams {
		return fmt.Errorf("%d streams are outside 1 to %d", s.Streams, maxStreams)
	}
	if each := int64(s.Size) + int64(s.Read); each*int64(s.Streams) > maxMemory {
		return fmt.Errorf("%d streams with %d bytes each take more than %d bytes", s.Streams, each, int64(maxMemory))
	}
	if !(s.Warmup >= 0) || !(s.Time > 0) || s.Warmup+s.Time > 2*maxTime.Seconds() {
		return fmt.Errorf("times of %v and %v seconds cannot be run", s.Warmup, s.Time)
	}
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
