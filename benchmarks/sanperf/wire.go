package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
)

// Each connection to a server starts with a hello: the magic, then a token. A
// zero token opens a control connection, on which both sides exchange one JSON
// value per step:
//
//	client: spec
//	server: offer, with the token for this measurement's streams
//	client: opens spec.Streams connections with that token
//	server: started, when all are there
//	        (both sides run their load)
//	both:   measured, when they have measured; then they wait for the other's
//	        (the senders end, the streams drain)
//	server: side
const (
	magic    = "SANPERF1"
	tokenLen = 16
	helloLen = len(magic) + tokenLen
)

type token [tokenLen]byte

// An offer is the answer to a spec.
type offer struct {
	Token token  `json:"token"`
	Error string `json:"error,omitempty"` // why the server refuses
}

type started struct {
	Error string `json:"error,omitempty"`
}

// exchangeMeasured reports the end of measuring to the other side, and waits for the same
// from there.
func exchangeMeasured(in *json.Decoder, out *json.Encoder) error {
	var answer string
	err := out.Encode(measured)
	if err == nil {
		err = in.Decode(&answer)
	}
	if err != nil {
		return fmt.Errorf("the other side is gone: %w", err)
	}
	if answer != measured {
		return fmt.Errorf("the other side says %q instead of %q", answer, measured)
	}
	return nil
}

const measured = "measured"

func writeHello(w io.Writer, t token) error {
	_, err := w.Write(append([]byte(magic), t[:]...))
	return err
}

func readHello(r io.Reader) (t token, err error) {
	var hello [helloLen]byte
	if _, err := io.ReadFull(r, hello[:]); err != nil {
		return t, err
	}
	if !bytes.HasPrefix(hello[:], []byte(magic)) {
		return t, fmt.Errorf("not a sanperf client, or one of another version: %q", hello[:len(magic)])
	}
	return token(hello[len(magic):]), nil
}
