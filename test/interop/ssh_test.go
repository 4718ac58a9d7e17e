package interop

import (
	"bytes"
	"crypto/ed25519"
	"net"
	"testing"

	"golang.org/x/crypto/ssh"
)

// sshKey is the host's key, the same in both processes.
var sshKey = must(ssh.NewSignerFromKey(ed25519.NewKeyFromSeed(make([]byte, ed25519.SeedSize))))

// The server answers each command with that command's input.
func serveSSH(l net.Listener) func() error {
	config := &ssh.ServerConfig{NoClientAuth: true}
	config.AddHostKey(sshKey)
	return serveEach(l, func(c net.Conn) error {
		_, channels, requests, err := ssh.NewServerConn(c, config)
		if err != nil {
			return err
		}
		go ssh.DiscardRequests(requests)
		return handleAll(func() (command, error) { return acceptCommand(channels) }, command.run)
	})
}

// command is a channel of an SSH connection on which a command was started.
type command struct {
	ssh.Channel
	requests <-chan *ssh.Request
}

func acceptCommand(channels <-chan ssh.NewChannel) (command, error) {
	next, ok := <-channels
	if !ok {
		return command{}, net.ErrClosed
	}
	channel, requests, err := next.Accept()
	return command{channel, requests}, err
}

func (c command) run() error {
	for r := range c.requests {
		r.Reply(r.Type == "exec", nil)
		if r.Type == "exec" {
			break
		}
	}
	go ssh.DiscardRequests(c.requests)
	if err := echoBack(c.Channel); err != nil {
		return err
	}
	_, err := c.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{0}))
	return err
}

// Several commands with input and output run at the same time on one SSH connection.
func useSSH(t *testing.T, dial dialFunc, address string) {
	conn := mustDial(t, dial, address)
	c, channels, requests, err := ssh.NewClientConn(conn, address, &ssh.ClientConfig{
		User:            "user",
		HostKeyCallback: ssh.FixedHostKey(sshKey.PublicKey()),
	})
	if err != nil {
		t.Fatal(err)
	}
	client := ssh.NewClient(c, channels, requests)
	defer client.Close()
	together(8, func() {
		s, err := client.NewSession()
		if err != nil {
			t.Error(err)
			return
		}
		defer s.Close()
		data := randomBytes(1<<20 + 7)
		s.Stdin = bytes.NewReader(data)
		got, err := s.Output("cat")
		if err != nil {
			t.Error(err)
		}
		wantBytes(t, got, data)
	})
}
