package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"syscall"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
)

// ErrNoSecret is returned by Meet if the user has given no secret, and the launcher has no private channel on
// which rank 0 could send a secret to the other ranks.
var ErrNoSecret = errors.New(
	"the job has no secret: give all ranks the same file in HVD_SECRET_FILE, or set HVD_INSECURE=1 to accept " +
		"any process that can connect to the ports of the job")

// ErrMet is returned by a second call of Meet. The launcher allows a process to meet the other ranks only
// once.
var ErrMet = errors.New("this process has already met the other ranks, which the launcher allows only once")

// MeetOptions says how the ranks meet. The zero value is enough if the launcher provides the address where
// the ranks meet, and either a secret or a private channel on which rank 0 can send one.
type MeetOptions struct {
	// Secret is the secret that the user has given. It must be the same at all ranks. If it is zero and the
	// launcher has a private channel, rank 0 makes a secret and sends it to the other ranks.
	Secret secret.Secret
	// Insecure permits a job without a secret if the user has given none and the launcher has no private
	// channel.
	Insecure bool
	// Encrypt says whether connections are encrypted if rank 0 makes the secret (secret.Secret.Encrypted). It
	// must be the same at all ranks. If the user has given Secret, Encrypt has no effect, because Secret
	// itself says whether connections are encrypted.
	Encrypt bool
	// Host is the name or address of the host of rank 0. It replaces the name from the launcher. It is used
	// only if the ranks are on several hosts. The other ranks dial Host and Port, so Port is needed too,
	// unless the launcher provides one. With MPICH, rank 0 sends Host to the other ranks. With hvdrun, Host
	// has no effect.
	Host string
	// Port is the port on which rank 0 serves its store. If it is 0, rank 0 uses the port from the launcher
	// or the default port. In a plain environment Port replaces MASTER_PORT. Port does not change the ports
	// of torchrun's TCPStore and of hvdrun's store.
	Port int
	// Interfaces are the network interfaces that the user has chosen.
	//
	// If all ranks are on one host, rank 0 listens on loopback. If the ranks are on several hosts, rank 0
	// listens on a chosen address to which the name that the other ranks dial resolves. If there is no such
	// address, or if no interface is chosen, it listens on all interfaces. If rank 0 has to send its address
	// to the other ranks and Host is empty, it sends the first chosen address.
	Interfaces netif.Choice
	// Log is the log of the servers that Meet starts. It may be nil.
	Log *zap.Logger

	// resolver, if not nil, replaces the system's lookup of host names in tests. If it returns a
	// *net.DNSError, the lookup is repeated until ctx ends.
	resolver func(ctx context.Context, host string) (addr string, err error)
}

// Meet connects the ranks to one store. It supports all launchers except hvdrun (see Dial for that). Each
// rank calls it once. At rank 0 it returns as soon as the other ranks can find the store. At the other ranks
// it returns when they are connected. If ctx ends before, it returns an error.
//
// A launcher that speaks PMI gives each process only one connection, and Meet uses that connection. So a
// program that meets through PMI cannot call MPI_Init as well.
func (e *Env) Meet(ctx context.Context, o MeetOptions) (*Place, error) {
	err := ErrMet
	m := &Place{Rank: e.Rank, Size: e.Size, JobID: e.JobID}
	if !e.met.Swap(true) {
		err = e.meet(ctx, o, m)
	}
	if err != nil {
		// The error of Close is ignored, because the caller needs the cause of the failure.
		_ = m.Close()
		return nil, fmt.Errorf("bootstrap: rank %d of %d (%s): meeting the other ranks: %w", e.Rank, e.Size,
			e.Kind, err)
	}
	return m, nil
}

func (e *Env) meet(ctx context.Context, o MeetOptions, m *Place) error {
	if o.Port == 0 {
		o.Port = e.port
	}
	if !o.Secret.IsZero() || o.Insecure {
		// The user has given a secret or permitted a job without one. So ranks may be on other hosts, even if
		// the address is a loopback name here. For example, older versions of Kubeflow give rank 0 the name
		// localhost, and give the other ranks the name of rank 0's host.
		e.loopback = false
	}
	switch {
	case e.Size == 1:
		return m.single(o)
	case e.way == atLauncher:
		return errors.New("Meet does not connect to the store of hvdrun: use Dial")
	case e.way == atMaster:
		return e.meetAtMaster(ctx, o, m)
	case e.way == byPMI:
		return e.meetByPMI(ctx, o, m)
	case o.Host != "":
		return e.meetAtHost(ctx, o, m, o.Host)
	case e.way == byFile:
		return e.meetByFile(ctx, o, m)
	case e.way == atAgent:
		return e.meetAtTorch(ctx, o, m)
	case e.way == byUser:
		return errors.New(e.noPlace())
	case e.Kind == Slurm && e.Rank == 0 && e.node > 0:
		return fmt.Errorf("rank 0 is on node %d of the Slurm step, want node 0: set HVD_RENDEZVOUS_HOST to the host of rank 0", e.node)
	}
	return e.meetAtHost(ctx, o, m, e.host)
}

// single fills the fields of m for a job that has only one rank.
func (m *Place) single(o MeetOptions) error {
	h := store.NewHashStore(store.Limits{})
	m.Store, m.Secret = h, o.Secret
	m.onClose(h.Close)
	return nil
}

// jobKey is the key under which rank 0 writes the name of the job to its store. The other ranks check the
// name, because a store on a fixed port may belong to another job.
const jobKey = "bootstrap/job"

func (e *Env) jobValue(m *Place) string {
	return fmt.Sprintf("%s of %d ranks by %s", quote(m.JobID), e.Size, e.Kind)
}

// serve serves a store at host:port. Rank 0 itself uses the store directly, without a connection.
func (e *Env) serve(ctx context.Context, o MeetOptions, m *Place, host string,
	port int) (*store.Server, error) {
	h := store.NewHashStore(store.Limits{})
	if err := h.Set(ctx, jobKey, []byte(e.jobValue(m))); err != nil {
		return nil, errors.Join(err, h.Close())
	}
	server, err := m.serve(net.JoinHostPort(host, strconv.Itoa(port)), h,
		store.Config{Secret: m.Secret, Log: o.Log})
	if errors.Is(err, syscall.EADDRINUSE) {
		err = fmt.Errorf("%w: choose another port with HVD_RENDEZVOUS_PORT", err)
	}
	return server, err
}

// dial connects to the store of rank 0 and checks that it belongs to this job.
func (e *Env) dial(ctx context.Context, o MeetOptions, m *Place, host string, port int) error {
	var got []byte
	var wait dial.Backoff
	for {
		err := e.connect(ctx, o, m, host, port)
		if err != nil {
			return err
		}
		if got, err = m.Store.Get(ctx, jobKey); err == nil {
			break
		}
		// Every store has the key, so this one has just ended. It may be that of an earlier program.
		if ctx.Err() != nil || !dial.MayRecover(err) {
			return err
		}
		dial.Pause(ctx, wait.Next(), nil)
	}
	if string(got) != e.jobValue(m) {
		advice := "choose another port with HVD_RENDEZVOUS_PORT"
		if e.way == atMaster {
			advice = "set the same WORLD_SIZE at all ranks, and another " + e.portName + " for each job"
		}
		return fmt.Errorf("the store at %s belongs to job %s, want job %s: %s",
			net.JoinHostPort(host, strconv.Itoa(port)), got[:min(len(got), 200)], e.jobValue(m), advice)
	}
	return nil
}

func (e *Env) connect(ctx context.Context, o MeetOptions, m *Place, host string, port int) error {
	host, err := o.resolve(ctx, host)
	if err != nil {
		return err
	}
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	client, err := store.Dial(ctx, addr, store.Config{Secret: m.Secret, Log: o.Log})
	if err != nil {
		return err
	}
	m.Store, m.Addr = client, addr
	m.onClose(client.Close)
	return nil
}

func (o *MeetOptions) resolve(ctx context.Context, host string) (addr string, err error) {
	if o.resolver == nil || host == loopback {
		return host, nil
	}
	err = dial.Retry(ctx, func() (err error) {
		addr, err = o.resolver(ctx, host)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("resolving %s: %w", host, err)
	}
	return addr, nil
}

const loopback = "127.0.0.1"

// Rank 0 sends one of these words instead of a secret. The first two are shorter than any secret, so no
// secret can be equal to one of them. The others are used only if rank 0 never sends the secret itself.
const (
	wordGiven = "given" // the user has given the secret to every rank
	wordNone  = "none"
	// wordSocket is followed by the name of a socket (handOver).
	wordSocket = "socket:"
	// wordPrint is followed by the fingerprint of the secret that the user has given.
	wordPrint = "given:"
)

// errGivenToSome reports that the user has given a secret to this rank, but not to rank 0.
var errGivenToSome = errors.New("this rank was given a secret, but rank 0 was not: set HVD_SECRET_FILE at all ranks")

// ownSecret returns the secret of rank 0 and the word that rank 0 sends to the other ranks, so that they get
// the same secret. The word is one of the constants above, or the text of the secret.
func (o *MeetOptions) ownSecret() (secret.Secret, string) {
	if !o.Secret.IsZero() {
		return o.Secret, wordGiven
	}
	s, word := secret.New()
	return o.encrypted(s), word
}

// encrypted returns s, a secret that rank 0 has made. If Encrypt is set, the secret that it returns encrypts
// connections.
func (o *MeetOptions) encrypted(s secret.Secret) secret.Secret {
	if o.Encrypt {
		return s.Encrypted()
	}
	return s
}

// secretFor returns the secret of a rank that has received word from rank 0. At rank 0, ownSecret has
// returned word.
func (o *MeetOptions) secretFor(word string) (secret.Secret, error) {
	switch {
	case word == wordGiven && o.Secret.IsZero():
		return secret.Secret{}, errors.New("rank 0 was given a secret, but this rank was not: set HVD_SECRET_FILE at all ranks")
	case word != wordGiven && !o.Secret.IsZero():
		return secret.Secret{}, errGivenToSome
	case word == wordGiven:
		return o.Secret, nil
	case word == wordNone:
		return secret.Secret{}, nil
	}
	s, err := secret.Parse(word)
	return o.encrypted(s), err
}

// announce serves a store at rank 0. The port is o.Port or, if that is 0, a free port. announce returns a
// text with the address of the store and the word of ownSecret. parseAnnouncement parses this text.
func (e *Env) announce(ctx context.Context, o MeetOptions, m *Place) (text string, err error) {
	var word string
	m.Secret, word = o.ownSecret()
	host, err := e.announcedHost(o)
	if err != nil {
		return "", err
	}
	listen, err := e.listenHost(ctx, o, host)
	if err != nil {
		return "", err
	}
	server, err := e.serve(ctx, o, m, listen, o.Port)
	if err != nil {
		return "", err
	}
	_, port, err := net.SplitHostPort(server.Addr())
	if err != nil {
		return "", err
	}
	return net.JoinHostPort(host, port) + "," + word, nil
}

// announcedHost returns the host that the other ranks must dial to reach rank 0.
func (e *Env) announcedHost(o MeetOptions) (string, error) {
	switch {
	case e.OneHost():
		return loopback, nil
	case o.Host != "":
		return o.Host, nil
	case !o.Interfaces.IsZero():
		addr, err := o.Interfaces.Any()
		return addr.String(), err
	}
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("reading the name of this host: %w", err)
	}
	return host, nil
}

// dialAnnounced connects to the store that text describes. At rank 0, announce has returned text.
func (e *Env) dialAnnounced(ctx context.Context, o MeetOptions, m *Place, text string) error {
	host, port, word, err := parseAnnouncement(text)
	if err != nil {
		return err
	}
	if m.Secret, err = o.secretFor(word); err != nil {
		return err
	}
	return e.dial(ctx, o, m, host, port)
}

// parseAnnouncement parses a text host:port,word. Its errors do not contain the word, because the word may be
// a secret.
func parseAnnouncement(text string) (host string, port int, word string, err error) {
	at, word, ok := strings.Cut(text, ",")
	if !ok {
		return "", 0, "", fmt.Errorf("malformed announcement from rank 0: got %d bytes without a comma, want \"host:port,secret\"",
			len(text))
	}
	host, portText, err := net.SplitHostPort(at)
	if err != nil || host == "" {
		return "", 0, "", errors.New(
			"malformed announcement from rank 0: got no address, want \"host:port,secret\"")
	}
	if port, err = decimal(portText, 1<<16-1); err != nil || port == 0 {
		return "", 0, "", errors.New("malformed announcement from rank 0: got no port, want \"host:port,secret\"")
	}
	return host, port, word, nil
}
