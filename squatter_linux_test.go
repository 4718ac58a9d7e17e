package san

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
	"github.com/sanconn/san/provider/shm"
)

// Another user takes the names under which a process would be found, in advance. Whatever it
// answers, connections move to their own process, which has the next name, or stay.
func TestSquatter(t *testing.T) {
	testenv.NeedRoot(t)
	for _, answers := range []string{"nothing", "garbage", "hangs up"} {
		for _, names := range []int{4, shm.Numbers} {
			t.Run(fmt.Sprintf("%s by %d names", answers, names), func(t *testing.T) {
				tcp := plainListen(t, "127.0.0.1:0")
				port := portOf(tcp.Addr().String())
				squatter := startProcess(t, "squat", moves, port, func(c *exec.Cmd) {
					asNobody(c)
					c.Env = append(c.Env, envName+"="+answers, envBytes+"="+strconv.Itoa(names))
				})
				squatter.line(t)
				l := mustAdopt(t, &ListenConfig{Providers: []string{shm.Name}}, tcp)
				go reply(l, 1)
				var by answeredBy
				for range 3 {
					var err error
					if by, err = exchange(atOnce(), tcp.Addr().String()); err != nil || by.name != 1 {
						t.Fatalf("%+v, %v", by, err)
					}
				}
				switch {
				case names < shm.Numbers && by.provider != shm.Name:
					t.Errorf("by %s: %s", by.provider, by.why)
				case names == shm.Numbers && by.provider != providerTCP:
					t.Errorf("by %s, and nobody is to be found", by.provider)
				case names == shm.Numbers && reasonOf(l.Unavailable()[shm.Name]) != ReasonResources:
					t.Errorf("the listener lacks %v", l.Unavailable())
				}
			})
		}
	}
}

func init() { roles["squat"] = roleSquat }

// roleSquat takes a port's names.
func roleSquat(lane) error {
	names, _ := strconv.Atoi(os.Getenv(envBytes))
	for n := range names {
		l, err := net.Listen("unixpacket", fmt.Sprintf("@san-shm/7/%s/%d", os.Getenv(envAddr), n))
		if err != nil {
			return err
		}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				switch os.Getenv(envName) {
				case "garbage":
					fmt.Fprint(c, strings.Repeat("garbage", 20))
				case "hangs up":
					c.Close()
				}
			}
		}()
	}
	fmt.Println("squats")
	select {}
}
