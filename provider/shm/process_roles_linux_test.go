package shm

import (
	"bytes"
	"fmt"
	"io"
	"math/rand"
	"net"
	"os"
	"os/exec"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/sanconn/san/provider/shm/internal/ring"
	"github.com/sanconn/san/session"
)

func init() {
	roles["squat"] = squat
	roles["fork"] = func() error { return serveRole(forkAndEcho) }
	roles["exec"] = func() error { return serveRole(becomeAnother) }
	roles["flood"] = func() error { return serveRole(flood) }
	roles["hold"] = func() error { return serveRole(hold) }
}

// squat takes a name, and prints what the first process that connects sends.
func squat() error {
	u, err := net.ListenUnix("unixpacket", &net.UnixAddr{Net: "unixpacket", Name: os.Getenv("NAME")})
	if err != nil {
		return err
	}
	defer u.Close()
	fmt.Println("squatting")
	c, err := u.AcceptUnix()
	if err != nil {
		return err
	}
	n, _ := io.Copy(io.Discard, c)
	fmt.Println("came", n, "bytes")
	untilStdinEnds()
	return nil
}

// forkAndEcho echoes, and forks a child that keeps every descriptor and lives on.
func forkAndEcho(p *peer) {
	keep := keepDescriptors()
	sleep := exec.Command("sleep", "60")
	sleep.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: 0}
	sleep.ExtraFiles = keep
	if err := sleep.Start(); err != nil {
		fmt.Println("error", err)
	}
	fmt.Println("forked", sleep.Process.Pid)
	echo(p)
}

// becomeAnother echoes, and then executes another program.
func becomeAnother(p *peer) {
	var ev session.Event
	p.poll(&ev)
	msg := bytes.Clone(ev.Msg)
	p.Drop()
	p.send(msg)
	syscall.Exec("/bin/sleep", []string{"sleep", "60"}, nil)
}

// flood sends to each process that connects.
func flood(p *peer) {
	receiver := make(chan struct{})
	defer func() { <-receiver }()
	go func() {
		defer close(receiver)
		var ev session.Event
		for p.poll(&ev) {
			p.Drop()
		}
	}()
	r := rand.New(rand.NewSource(4))
	for i := uint64(0); ; i++ {
		n := min(8+r.Intn(1<<r.Intn(17)), ring.MaxMessage)
		buf := p.reserve(n, n)
		if buf == nil {
			return
		}
		pattern(buf, i)
		p.Commit(n)
	}
}

// hold accepts connections and keeps them, with few descriptors to spare.
func hold(p *peer) {
	var ev session.Event
	for p.poll2(&ev) {
		p.send(ev.Msg)
		p.Drop()
	}
}

// keepDescriptors returns all descriptors of this process, for a child to inherit.
func keepDescriptors() (files []*os.File) {
	names, _ := os.ReadDir("/proc/self/fd")
	for _, n := range names {
		var fd int
		fmt.Sscan(n.Name(), &fd)
		if dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 100); err == nil && fd > 2 {
			files = append(files, os.NewFile(uintptr(dup), n.Name()))
		}
	}
	return files
}

// poll2 is poll without the bound of patience.
func (p *peer) poll2(ev *session.Event) bool {
	for {
		p.Arm(session.RecvReady)
		if p.Poll(ev) {
			return true
		}
		if p.Err() != nil {
			return p.Poll(ev)
		}
		<-p.in.woken
	}
}
