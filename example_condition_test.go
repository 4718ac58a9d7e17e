package san_test

import (
	"context"
	"errors"
	"log"
	"os"

	"github.com/sanconn/san"
)

// A server that shares memory only with processes of its own user. Connections of other users stay on
// TCP.
func ExampleListenConfig_condition() {
	lc := san.ListenConfig{Condition: func(o san.MoveProposal) error {
		if o.Provider == "shm" && o.UID != int64(os.Geteuid()) {
			return errors.New("another user")
		}
		return nil
	}}
	l, err := lc.Listen(context.Background(), "tcp", "localhost:7000")
	if err != nil {
		log.Fatal(err)
	}
	defer l.Close()
}
