package place

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/store"
	"github.com/gohvd/gohvd/store/c10d"
)

// ErrNoSecret is the error of a job whose launcher has no private channel for a secret, and whose user gave
// none.
var ErrNoSecret = errors.New(
	"no secret: give all ranks the same file in HVD_SECRET_FILE, or set HVD_INSECURE=1 to accept " +
		"any process that can connect to the ports of the job")

// ErrMet is the error of a second Meet: what the launcher provides for it can be used only once.
var ErrMet = errors.New("this process has already met the other ranks, which the launcher allows only once")

// MeetOptions say how ranks meet. The zero value works if the launcher provides everything.
type MeetOptions struct {
	// Secret is the secret that the user gave, the same at all ranks. Without one, rank 0 makes a secret if
	// the launcher has a private way to hand it to the others.
	Secret secret.Secret
	// Insecure lets the ranks meet without a secret if there is no such way.
	Insecure bool
	// Encrypt makes connections under a secret that rank 0 makes encrypted (secret.Secret.Encrypted).
	// Connections under Secret are encrypted if Secret says so itself. All ranks must agree.
	Encrypt bool
	// Host is the name or address of the host of rank 0, instead of what the launcher says, if the ranks are
	// on several hosts. The others dial Host and Port, so Port must be given unless the launcher has one.
	// With MPICH rank 0 hands Host to the others; with hvdrun it has no effect.
	Host string
	// Port is the port at which rank 0 serves, instead of the launcher's or the default; 0 chooses those. In
	// a plain environment it replaces MASTER_PORT. It does not move the TCPStore of torchrun or the store of
	// hvdrun.
	Port int
	// Interfaces are the network interfaces that the user has chosen. If the ranks are on several hosts rank
	// 0 listens on the first chosen address at which the others reach it. It listens on all interfaces if
	// none is chosen, or if the name that the others dial leads to another address. If rank 0 tells the
	// others an address, and Host is empty, it is the first chosen one. On one host it listens on loopback.
	Interfaces netif.Choice
	// Log is the log of the servers; it may be nil.
	Log *zap.Logger

	// resolver, if not nil, replaces the system's lookup of host names, for tests. A *net.DNSError is retried
	// until ctx ends.
	resolver func(ctx context.Context, host string) (addr string, err error)
}

// Meet brings the ranks to a store, except hvdrun's (see Dial). Each rank calls it once. It returns at rank 0
// as soon as the others can find the store, and at the others when they have. It waits until ctx ends.
//
// With PMI the ranks talk to the launcher on the one connection that each process has for that, so a program
// that meets in this way cannot call MPI_Init as well.
func (e *Env) Meet(ctx context.Context, o MeetOptions) (*Place, error) {
	err := ErrMet
	m := &Place{Rank: e.Rank, Size: e.Size, JobID: e.JobID}
	if !e.met.Swap(true) {
		err = e.meet(ctx, o, m)
	}
	if err != nil {
		// The caller needs the cause, not an error of this clean-up.
		_ = m.Close()
		return nil, fmt.Errorf("place: rank %d of %d (%s): meeting the other ranks: %w", e.Rank, e.Size,
			e.Kind, err)
	}
	return m, nil
}

func (e *Env) meet(ctx context.Context, o MeetOptions, m *Place) error {
	if o.Port == 0 {
		o.Port = e.port
	}
	if !o.Secret.IsZero() || o.Insecure {
		// Other ranks may be on other hosts: older versions of Kubeflow give rank 0 the name localhost, and
		// give the other ranks the name of its host.
		e.loopback = false
	}
	switch {
	case e.Size == 1:
		return m.single(o)
	case e.Kind == Hvdrun:
		return errors.New("Meet does not connect to the store of hvdrun, want Dial")
	case e.atMaster():
		return e.meetAtMaster(ctx, o, m)
	case o.Host != "" && e.Kind != PMI:
		return e.meetAt(ctx, o, m, o.Host)
	case e.Kind == OpenMPI:
		return e.meetByFile(ctx, o, m)
	case e.Kind == PMI:
		return e.meetByPMI(ctx, o, m)
	case e.Kind == Torchrun:
		return e.meetAtTorch(ctx, o, m)
	case e.Kind == Slurm && e.Rank == 0 && e.node > 0:
		return fmt.Errorf("rank 0 is on node %d of the step, want node 0: set HVD_RENDEZVOUS_HOST to the host of rank 0", e.node)
	}
	return e.meetAt(ctx, o, m, e.host)
}

// single makes m the place of a job of one rank.
func (m *Place) single(o MeetOptions) error {
	h := store.NewHashStore(store.Limits{})
	m.Store, m.Secret = h, o.Secret
	m.onClose(h.Close)
	return nil
}

// jobKey is the key by which rank 0 says which job its store belongs to: a store on a fixed port may be that
// of another job.
const jobKey = "place/job"

func (e *Env) jobValue(m *Place) string {
	return fmt.Sprintf("%s of %d ranks by %s", quote(m.JobID), e.Size, e.Kind)
}

// serve serves a store at host:port, which rank 0 uses directly.
func (e *Env) serve(ctx context.Context, o MeetOptions, m *Place, host string,
	port int) (*store.Server, error) {
	h := store.NewHashStore(store.Limits{})
	m.Store = h
	m.onClose(h.Close)
	if err := h.Set(ctx, jobKey, []byte(e.jobValue(m))); err != nil {
		return nil, err
	}
	server, err := store.Serve(net.JoinHostPort(host, strconv.Itoa(port)), h,
		store.Config{Secret: m.Secret, Log: o.Log})
	if err != nil {
		if errors.Is(err, syscall.EADDRINUSE) {
			err = fmt.Errorf("%w: choose another port with HVD_RENDEZVOUS_PORT", err)
		}
		return nil, err
	}
	m.onClose(server.Close)
	return server, nil
}

// dial connects to the store of rank 0.
func (e *Env) dial(ctx context.Context, o MeetOptions, m *Place, host string, port int) error {
	if err := e.connect(ctx, o, m, host, port); err != nil {
		return err
	}
	got, err := m.Store.Get(ctx, jobKey)
	if err != nil {
		return err
	}
	if string(got) != e.jobValue(m) {
		advice := "choose another port with HVD_RENDEZVOUS_PORT"
		if e.atMaster() {
			advice = "set the same WORLD_SIZE at all ranks, and another MASTER_PORT for each job"
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

// meetAt meets at an address that all ranks know beforehand.
func (e *Env) meetAt(ctx context.Context, o MeetOptions, m *Place, host string) error {
	if o.Secret.IsZero() && !o.Insecure {
		return ErrNoSecret
	}
	if o.Port == 0 {
		return fmt.Errorf("the port of rank 0 on %s is unknown: choose one with HVD_RENDEZVOUS_PORT", host)
	}
	m.Secret = o.Secret
	if e.Rank != 0 {
		if e.OneHost() {
			host = loopback
		}
		return e.dial(ctx, o, m, host, o.Port)
	}
	listen, err := e.listenHost(ctx, o, host)
	if err != nil {
		return err
	}
	_, err = e.serve(ctx, o, m, listen, o.Port)
	return err
}

const loopback = "127.0.0.1"

// lookupTime bounds how long rank 0 retries the lookup of its own address: the name of a pod may appear
// shortly after the pod. The other ranks retry until they succeed.
const lookupTime = 2 * time.Second

// listenHost returns the address on which rank 0 listens for ranks that dial host. Empty means all
// interfaces.
func (e *Env) listenHost(ctx context.Context, o MeetOptions, host string) (string, error) {
	if e.OneHost() {
		return loopback, nil
	}
	if o.Interfaces.IsZero() {
		return "", nil
	}
	chosen, err := o.Interfaces.Addresses()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	var addrs []netip.Addr
	err = dial.Retry(ctx, func() (err error) {
		addrs, err = o.addresses(ctx, host)
		return err
	})
	for _, a := range addrs {
		if slices.Contains(chosen, a) {
			return a.String(), nil
		}
	}
	if o.Log != nil {
		o.Log.Warn("the store listens on all interfaces: the name that the other ranks dial resolves to no address of the chosen interfaces",
			zap.String("name", host), zap.Stringers("addresses", addrs), zap.Stringer("chosen", o.Interfaces),
			zap.Error(err))
	}
	return "", nil
}

// addresses returns the addresses of a host as this host knows them.
func (o *MeetOptions) addresses(ctx context.Context, host string) ([]netip.Addr, error) {
	if o.resolver != nil {
		text, err := o.resolver(ctx, host)
		if err != nil {
			return nil, err
		}
		a, err := netip.ParseAddr(text)
		return []netip.Addr{a}, err
	}
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", host)
	for i := range addrs {
		addrs[i] = addrs[i].Unmap()
	}
	return addrs, err
}

// Words in place of a secret, shorter than any.
const (
	wordGiven = "given" // the user has given a secret to every rank
	wordNone  = "none"
)

// ownSecret returns the secret of rank 0, and the word by which rank 0 tells the others about it.
func (o *MeetOptions) ownSecret() (secret.Secret, string) {
	if !o.Secret.IsZero() {
		return o.Secret, wordGiven
	}
	s, word := secret.New()
	return o.encrypted(s), word
}

// encrypted applies Encrypt to a secret that rank 0 has made.
func (o *MeetOptions) encrypted(s secret.Secret) secret.Secret {
	if o.Encrypt {
		return s.Encrypted()
	}
	return s
}

// secretFor returns the secret that follows from the word of rank 0.
func (o *MeetOptions) secretFor(word string) (secret.Secret, error) {
	switch {
	case word == wordGiven && o.Secret.IsZero():
		return secret.Secret{}, errors.New("rank 0 was given a secret, but this rank was not")
	case word != wordGiven && !o.Secret.IsZero():
		return secret.Secret{}, errors.New("this rank was given a secret, but rank 0 was not")
	case word == wordGiven:
		return o.Secret, nil
	case word == wordNone:
		return secret.Secret{}, nil
	}
	s, err := secret.Parse(word)
	return o.encrypted(s), err
}

// announce serves a store on a free port, and returns its address and the secret in the form that
// parseAnnouncement reads.
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

// announcedHost returns the host that rank 0 tells the others to dial.
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
		return "", fmt.Errorf("name of this host: %w", err)
	}
	return host, nil
}

// dialAnnounced connects to the store that announce has described.
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

// parseAnnouncement parses host:port,word. Its errors do not contain the word, which may be a secret.
func parseAnnouncement(text string) (host string, port int, word string, err error) {
	at, word, ok := strings.Cut(text, ",")
	if !ok {
		return "", 0, "", fmt.Errorf("malformed announcement of rank 0: got %d bytes, want host:port,secret",
			len(text))
	}
	host, portText, err := net.SplitHostPort(at)
	if err != nil || host == "" {
		return "", 0, "", errors.New(
			"malformed announcement of rank 0: got no address, want host:port,secret")
	}
	if port, err = decimal(portText, 1<<16-1); err != nil || port == 0 {
		return "", 0, "", errors.New("malformed announcement of rank 0: got no port, want host:port,secret")
	}
	return host, port, word, nil
}

// meetByFile meets by a file, for ranks on one host that have a directory for their job.
func (e *Env) meetByFile(ctx context.Context, o MeetOptions, m *Place) error {
	if !e.OneHost() {
		return fmt.Errorf("only %d of %d ranks are on this host, and Open MPI does not say on which host rank 0 is: set "+
			"HVD_RENDEZVOUS_HOST to the host of rank 0, or start the job with hvdrun -H", e.LocalSize, e.Size)
	}
	if !filepath.IsAbs(e.dir) {
		return fmt.Errorf("PMIX_SERVER_TMPDIR is %q, want the absolute path of the job's session directory",
			e.dir)
	}
	// Jobs that this job spawns share the directory, so the name of the file contains the job.
	path := filepath.Join(e.dir, "gohvd-"+fileName(e.JobID))
	if e.Rank != 0 {
		text, err := waitPrivate(ctx, path)
		if err != nil {
			return err
		}
		return e.dialAnnounced(ctx, o, m, text)
	}
	text, err := e.announce(ctx, o, m)
	if err != nil {
		return err
	}
	if err := writePrivate(path, text); err != nil {
		return err
	}
	m.removeWhenMet(func() error { return remove(path) })
	return nil
}

// pmiKey is the key under which rank 0 publishes its announcement.
const pmiKey = "gohvd-meet"

// meetByPMI meets by the key-value space that the launcher has for the ranks.
func (e *Env) meetByPMI(ctx context.Context, o MeetOptions, m *Place) error {
	if e.pmiFD < 0 {
		return errors.New("PMI_FD is not set: the launcher gave this process no connection to the launcher")
	}
	p, err := startPMI(ctx, e.pmiFD)
	if err != nil {
		return err
	}
	defer p.close()
	if m.JobID == "" {
		m.JobID = p.space
	}
	if e.Rank == 0 {
		text, err := e.announce(ctx, o, m)
		if err != nil {
			return err
		}
		if err := p.put(pmiKey, text); err != nil {
			return err
		}
	}
	if err := p.barrier(); err != nil {
		return err
	}
	if e.Rank != 0 {
		text, err := p.get(pmiKey)
		if err != nil {
			return err
		}
		if err := e.dialAnnounced(ctx, o, m, text); err != nil {
			return err
		}
	}
	return p.finalize()
}

// torchSecretKey is the key under which rank 0 says how the others get the secret: a word, or the path of a
// file. The secret itself is not stored there, because anybody who reaches a TCPStore can read it.
const torchSecretKey = "secret"

// meetAtTorch meets at the TCPStore of torchrun's agent.
func (e *Env) meetAtTorch(ctx context.Context, o MeetOptions, m *Place) error {
	if o.Secret.IsZero() && !o.Insecure && !e.OneHost() {
		return ErrNoSecret
	}
	host, err := o.resolve(ctx, e.host)
	if err != nil {
		return err
	}
	addr := net.JoinHostPort(host, strconv.Itoa(e.port))
	client, err := c10d.Dial(ctx, addr, c10d.Unknown)
	if err != nil {
		return err
	}
	m.Addr = addr
	m.onClose(client.Close)
	m.Store = store.NewPrefixStore("gohvd/"+e.JobID, client)
	if e.Rank == 0 {
		word, err := e.torchSecret(o, m)
		if err != nil {
			return err
		}
		return m.Store.Set(ctx, torchSecretKey, []byte(word))
	}
	word, err := m.Store.Get(ctx, torchSecretKey)
	if err != nil {
		return err
	}
	return e.adoptTorchSecret(o, m, string(word))
}

// adoptTorchSecret sets the secret at a rank other than 0 to the one that rank 0 has announced.
func (e *Env) adoptTorchSecret(o MeetOptions, m *Place, word string) (err error) {
	if filepath.IsAbs(word) {
		if !e.OneHost() {
			return fmt.Errorf("rank 0 keeps the secret in a file on its host, but only %d of %d ranks are on this host",
				e.LocalSize, e.Size)
		}
		if word, err = readPrivate(word); err != nil {
			return err
		}
	} else if word != wordGiven && word != wordNone {
		return fmt.Errorf("malformed secret announcement of rank 0: got %d bytes, want a word or the path of a file", len(word))
	}
	if word == wordNone && !o.Insecure {
		return ErrNoSecret
	}
	m.Secret, err = o.secretFor(word)
	return err
}

// torchSecret sets the secret of rank 0, and returns what to tell the others.
func (e *Env) torchSecret(o MeetOptions, m *Place) (word string, err error) {
	if o.Secret.IsZero() && !e.OneHost() {
		return wordNone, nil
	}
	m.Secret, word = o.ownSecret()
	if word == wordGiven {
		return word, nil
	}
	dir, err := os.MkdirTemp("", "gohvd-")
	if err != nil {
		return "", err
	}
	m.removeWhenMet(func() error { return os.RemoveAll(dir) })
	path := filepath.Join(dir, "secret")
	return path, writePrivate(path, word)
}

const (
	// masterPlace is the key of the TCPStore at MASTER_ADDR:MASTER_PORT under which rank 0 publishes its own
	// store, as port,word with the word of torchSecret.
	masterPlace = "place"
	// masterClaim counts the jobs that meet there, by the ranks 0.
	masterClaim = "claim"
	// masterFreeKey is the key that rank 0 sets in its own store once it has closed MASTER_PORT.
	masterFreeKey = "place/master-free"
)

// meetAtMaster meets at MASTER_ADDR:MASTER_PORT, where by PyTorch's convention rank 0 serves a TCPStore.
// PyTorch in the same process may have served one already, or may serve one later. So the ranks learn only
// there how to reach a store of rank 0 at another port. Rank 0 tells them at PyTorch's store if that exists,
// else at one of its own, which it closes when all ranks have met and before any other rank goes on.
func (e *Env) meetAtMaster(ctx context.Context, o MeetOptions, m *Place) error {
	if o.Secret.IsZero() && !o.Insecure && !e.OneHost() {
		return ErrNoSecret
	}
	host, port := cmp.Or(o.Host, e.host), o.Port
	if e.OneHost() {
		host = loopback
	}
	if e.Rank == 0 {
		return e.publishAtMaster(ctx, o, m, host, port)
	}
	dialed, err := o.resolve(ctx, host)
	if err != nil {
		return err
	}
	master := net.JoinHostPort(dialed, strconv.Itoa(port))
	client, err := c10d.Dial(ctx, master, c10d.Unknown)
	if err != nil {
		return fmt.Errorf("no connection to rank 0 at MASTER_ADDR and MASTER_PORT: %w", err)
	}
	text, err := e.atMasterStore(client).Get(ctx, masterPlace)
	if err != nil {
		return errors.Join(fmt.Errorf(
			"rank 0 has published no address in the TCPStore at %s; if PyTorch serves it, all ranks must call "+
				"init_process_group and Init in the same order: %w", master, err), client.Close())
	}
	if err := client.Close(); err != nil {
		return err
	}
	portText, word, _ := strings.Cut(string(text), ",")
	if port, err = decimal(portText, 1<<16-1); err != nil || port == 0 {
		return fmt.Errorf("malformed announcement of rank 0 in the TCPStore at %s: got no port, want port,secret", master)
	}
	if err := e.adoptTorchSecret(o, m, word); err != nil {
		return err
	}
	m.onMet(func(ctx context.Context) error { return m.Store.Wait(ctx, masterFreeKey) })
	return e.dial(ctx, o, m, host, port)
}

// atMasterStore returns the part of that TCPStore that belongs to gohvd.
func (e *Env) atMasterStore(s store.Store) store.Store {
	return store.NewPrefixStore("gohvd/"+cmp.Or(e.JobID, "plain"), s)
}

// publishAtMaster does the part of rank 0 in meetAtMaster.
func (e *Env) publishAtMaster(ctx context.Context, o MeetOptions, m *Place, host string, port int) error {
	word, err := e.torchSecret(o, m)
	if err != nil {
		return err
	}
	listen, err := e.listenHost(ctx, o, host)
	if err != nil {
		return err
	}
	server, err := e.serve(ctx, o, m, listen, 0)
	if err != nil {
		return err
	}
	_, own, err := net.SplitHostPort(server.Addr())
	if err != nil {
		return err
	}
	master, release, err := masterStore(ctx, o, listen, port)
	if err != nil {
		return err
	}
	m.removeWhenMet(release)
	s := e.atMasterStore(master)
	// A compare-and-set would not do: older servers of PyTorch do not wake the ranks that wait for its key.
	if n, err := s.Add(ctx, masterClaim, 1); err != nil {
		return err
	} else if n != 1 { // another job may have the same secret, so the secret does not catch this
		return fmt.Errorf("another job, or another rank 0 of this job, uses port %d of this host: set RANK to another number at each rank, and MASTER_PORT to another port for each job", port)
	}
	m.removeWhenMet(func() error {
		// PyTorch's store outlives this meeting, and these processes may meet there again, so the keys must
		// go.
		ctx, cancel := context.WithTimeout(context.Background(), lookupTime)
		defer cancel()
		_, err := s.Delete(ctx, masterPlace)
		_, claimErr := s.Delete(ctx, masterClaim)
		return errors.Join(err, claimErr)
	})
	if err := s.Set(ctx, masterPlace, []byte(own+","+word)); err != nil {
		return err
	}
	m.onMet(func(ctx context.Context) error { return m.Store.Set(ctx, masterFreeKey, nil) })
	return nil
}

// masterStore returns a TCPStore that it serves on a port, or the one that is served there already.
func masterStore(ctx context.Context, o MeetOptions, listen string,
	port int) (s store.Store, release func() error, err error) {
	h := store.NewHashStore(store.Limits{})
	server, err := c10d.Serve(net.JoinHostPort(listen, strconv.Itoa(port)), h, c10d.Config{Log: o.Log})
	if err == nil {
		watch, stop := context.WithCancel(context.WithoutCancel(ctx))
		var watching sync.WaitGroup
		watching.Go(func() {
			if h.Wait(watch, c10d.WorkersKey) == nil && o.Log != nil {
				o.Log.Error("PyTorch of another rank has connected to MASTER_PORT while rank 0 is in Init: all ranks must call init_process_group and Init in the same order")
			}
		})
		release = func() error {
			stop()
			watching.Wait()
			return errors.Join(server.Close(), h.Close())
		}
		return store.NewPrefixStore("", h), release, nil // the keys of a TCPStore begin with a slash
	}
	if err = errors.Join(err, h.Close()); !errors.Is(err, syscall.EADDRINUSE) {
		return nil, nil, err
	}
	client, err := c10d.Dial(ctx, net.JoinHostPort(cmp.Or(listen, loopback), strconv.Itoa(port)),
		c10d.Unknown)
	if err != nil {
		return nil, nil, fmt.Errorf(
			"MASTER_PORT is in use on this host, but not by a TCPStore of PyTorch: %w", err)
	}
	return client, client.Close, nil
}
