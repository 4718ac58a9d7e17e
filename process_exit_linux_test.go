package san

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"testing"
	"time"
)

// exitConns is how many connections a process has when it ends while they move.
const exitConns = 8

// exitBytes is written on each of these connections.
var exitBytes = bytes.Repeat([]byte("last words "), 100)

func init() { roles["exit"] = roleExit }

// roleExit writes on connections that move at once, and ends during the move, without Close.
func roleExit(lane) error {
	var wrote sync.WaitGroup
	for range exitConns {
		c, err := atOnce().Dial("tcp", os.Getenv(envAddr))
		if err != nil {
			return err
		}
		wrote.Add(1)
		go func() {
			defer wrote.Done()
			if _, err := c.Write(exitBytes); err != nil {
				fmt.Println("error:", err)
			}
		}()
	}
	wrote.Wait()
	time.Sleep(time.Duration(rand.IntN(3000)) * time.Microsecond) // so that it ends at any step of a move
	os.Exit(0)
	return nil
}

// A process ends while its connections move, at any step: the peers read all bytes and the end of the
// stream. Some connections have moved by then, some are about to.
func TestProcessThatEndsAsItMoves(t *testing.T) {
	rounds := *killRounds
	if testing.Short() {
		rounds = min(rounds, 3)
	}
	ln := moves.listen(t, moves.here())
	moved := func() uint64 { return Stats().Accepted[moves.provider] }
	before, end := moved(), time.Now().Add(testTimeout)
	for i := 0; i < rounds || moved() == before && time.Now().Before(end); i++ {
		p := startRole(t, "exit", moves, ln.Addr().String())
		var read sync.WaitGroup
		for range exitConns {
			c := mustAccept(t, ln)
			c.SetDeadline(time.Now().Add(testTimeout))
			read.Add(1)
			go func() {
				defer read.Done()
				defer c.Close()
				var got bytes.Buffer
				if _, err := io.Copy(&got, c); err != nil || !bytes.Equal(got.Bytes(), exitBytes) {
					t.Errorf("%d bytes, %v", got.Len(), err)
				}
			}()
		}
		read.Wait()
		p.ended(t)
	}
	if moved() == before {
		t.Errorf("none has moved to %s", moves.provider)
	}
}
