package ps

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/config"
	"github.com/gohvd/gohvd/internal/dial"
	"github.com/gohvd/gohvd/internal/logs"
	"github.com/gohvd/gohvd/internal/metrics"
	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/ps/pspb"
	"github.com/gohvd/gohvd/internal/ps/van"
	"github.com/gohvd/gohvd/internal/secret"
	"github.com/gohvd/gohvd/internal/trace"
)

const (
	// customerWait is how long a message waits for the customer that it is for.
	customerWait = 10 * time.Second
	// leaveTime is how long Finalize waits until the other nodes have closed their connections.
	leaveTime = 5 * time.Second
	// maxHeld and maxHeldBytes bound the messages that wait for customers. maxHeldBytes also bounds those at
	// a server that wait for keys.
	maxHeld      = 1 << 12
	maxHeldBytes = 256 << 20
)

// postoffice is the part of this process in a job, for all its nodes (Postoffice of ps-lite). It passes what
// arrives to the customers.
type postoffice struct {
	cfg      van.Config
	set      config.Config
	van      *van.Van
	nodes    []*Node // by customer
	log      *zap.Logger
	launcher *launcher       // nil unless hvdrun has started this process as a node
	metrics  *metrics.Server // nil if the node serves no metrics
	// stopOffer stops offering the secret to other nodes. It is nil except at a scheduler that has made one.
	stopOffer func() error
	wg        sync.WaitGroup // requests that have not completed, and goroutines that call callbacks
	started   time.Time
	clocks    []workerClock // by customer
	// primaries has the id of the server that was the last one to answer for a range, by rank, or 0.
	primaries []atomic.Int32
	// joining counts the ranges that this server gets from another one, by the rank of that server.
	joining  []atomic.Int32
	observer observer

	mu        sync.Mutex
	waiting   map[[2]int]bool // barriers in which a node of this process waits, by customer and group
	customers map[customerKey]*customer
	held      []held // messages for customers that do not exist yet, in the order of arrival
	heldBytes int
	exits     []func()
	finalized chan struct{} // closed when Finalize has ended; nil before Finalize
	dumped    chan struct{} // closed when the last dump is written; nil if there is none
}

// held is a message for a customer that does not exist yet.
type held struct {
	from  van.Process
	m     *van.Message
	bytes int
	since time.Time
}

// start joins the job. Unless conf.Async is set, the caller enters a barrier of all nodes next.
func start(ctx context.Context, conf Config) (started *postoffice, err error) {
	set, err := config.FromEnvironment(conf.Settings, true)
	if err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	p := &postoffice{set: set, started: time.Now(), customers: make(map[customerKey]*customer),
		waiting: make(map[[2]int]bool)}
	if conf.Logger != nil {
		p.log = logs.FromSlog(conf.Logger)
	} else {
		if set.PS.Verbose > 0 {
			set.LogLevel = "info"
		}
		p.log = set.Logger(logs.Stderr{})
	}
	set.WarnUnread(config.Node)
	for _, w := range set.Warnings {
		p.log.Warn(w)
	}
	defer func() {
		if err != nil {
			p.closeOffer()
		}
	}()
	if p.cfg, err = vanConfig(ctx, &set, conf); err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	p.cfg.Meets = !conf.Async
	for c := range p.cfg.Customers {
		p.nodes = append(p.nodes, &Node{p, c})
	}
	p.clocks = make([]workerClock, p.cfg.Customers)
	p.primaries = make([]atomic.Int32, p.cfg.NumServers)
	p.joining = make([]atomic.Int32, p.cfg.NumServers)
	if p.observer.clock, err = trace.NewClock(p.started); err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	if err := p.checkMetrics(); err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	p.cfg.Log = p.log
	if err := p.connect(ctx, conf.Settings); err != nil {
		return nil, fmt.Errorf("ps: %w", public(err))
	}
	p.observe()
	if err := p.serveMetrics(); err != nil {
		p.stop()
		return nil, fmt.Errorf("ps: %w", err)
	}
	return p, nil
}

// connect connects this process with the other nodes of the job. If it meets the scheduler of an earlier job,
// which is about to end, or has got the secret from it, it tries again. own has the settings of the program.
func (p *postoffice) connect(ctx context.Context, own map[string]string) error {
	ctx, cancel := p.cfg.LimitStart(ctx)
	defer cancel()
	given := p.cfg.Secret
	var wrong secret.Secret // the last one that the scheduler has refused
	var wait dial.Backoff
	for {
		p.cfg.Secret = given
		if err := p.shareSecret(ctx); err != nil {
			return err
		}
		p.van = van.New(p.cfg, router{p})
		if err := p.dialLauncher(ctx, own); err != nil {
			return err
		}
		err := p.van.Start(ctx)
		if err == nil {
			return nil
		}
		p.closeLauncher()
		switch {
		case errors.Is(err, van.ErrOver):
		case errors.Is(err, secret.ErrWrong) && given.IsZero() && !wrong.Equal(p.cfg.Secret):
			wrong = p.cfg.Secret
		default:
			return err
		}
		if dial.Pause(ctx, wait.Next(), nil); ctx.Err() != nil {
			return err
		}
	}
}

// vanConfig checks the settings and returns the configuration of the van.
func vanConfig(ctx context.Context, set *config.Config, conf Config) (cfg van.Config, err error) {
	s := &set.PS
	cfg = van.Config{NumWorkers: s.NumWorkers, NumServers: s.NumServers, Customers: max(conf.Customers, 1),
		Rank: s.Rank, Root: net.JoinHostPort(s.RootHost, strconv.Itoa(s.RootPort)),
		StartTimeout:      set.StartTimeout,
		HeartbeatInterval: s.HeartbeatInterval, HeartbeatTimeout: s.HeartbeatTimeout, Resend: s.Resend,
		Staleness: s.Staleness, Replicas: s.Replicas,
		ResendTimeout: s.ResendTimeout, WaterMark: s.WaterMark, Verbose: s.Verbose, Faults: conf.faults}
	cfg.Role = map[string]van.Role{"scheduler": van.Scheduler, "server": van.Server,
		"worker": van.Worker}[s.Role]
	for _, v := range []struct {
		name    string
		missing bool
	}{{"DMLC_ROLE", cfg.Role == 0}, {"DMLC_PS_ROOT_URI", s.RootHost == ""}, {"DMLC_PS_ROOT_PORT",
		s.RootPort == 0},
		{"DMLC_NUM_WORKER", s.NumWorkers == config.Unset}, {"DMLC_NUM_SERVER",
			s.NumServers == config.Unset}} {
		if v.missing {
			return cfg,
				fmt.Errorf("%s is not set: set the variables of the parameter server (docs/settings.md)",
					v.name)
		}
	}
	if err = checkReplicas(s); err != nil {
		return cfg, err
	}
	if set.SharedMemory != config.SharedNever {
		if cfg.HostID, err = bootstrap.HostID(set); err != nil {
			return cfg, err
		}
	}
	if cfg.Role != van.Worker && cfg.Customers > 1 {
		return cfg, fmt.Errorf("a %s has %d customers, want 1: only a worker may have several", cfg.Role,
			cfg.Customers)
	}
	if cfg.Secret, err = set.JobSecret(); err != nil {
		return cfg, err
	}
	if set.TLS {
		if cfg.Secret.IsZero() && !sharesSecret(set, &cfg) {
			return cfg, errors.New("HVD_TLS needs a secret: set HVD_SECRET_FILE")
		}
		cfg.Secret = cfg.Secret.Encrypted()
	}
	switch cfg.Role {
	case van.Scheduler:
		cfg.Listen, cfg.Host = cfg.Root, s.RootHost
		if s.Kubernetes {
			cfg.Listen = net.JoinHostPort("", strconv.Itoa(s.RootPort))
		}
	case van.Server:
		if err := serverAddress(ctx, set, &cfg); err != nil {
			return cfg, err
		}
	default:
		cfg.Host = set.Hostname
		return cfg, nil // a worker does not listen
	}
	return cfg, checkSecret(set, cfg.Listen, cfg.Secret)
}

// sharesSecret reports whether the scheduler makes the secret and passes it to the other nodes. It does if
// the user has given none and the scheduler is on loopback, so that all nodes are on this host.
func sharesSecret(set *config.Config, cfg *van.Config) bool {
	return cfg.Secret.IsZero() && !set.Insecure && netif.IsLoopback(cfg.Root)
}

// shareSecret makes the secret at the scheduler, and gets it from the scheduler at other nodes, if the job
// shares one (sharesSecret).
func (p *postoffice) shareSecret(ctx context.Context) (err error) {
	cfg := &p.cfg
	switch {
	case !sharesSecret(&p.set, cfg):
		return nil
	case cfg.Role == van.Scheduler:
		var text string
		cfg.Secret, text = secret.New()
		p.stopOffer, err = bootstrap.OfferSecret(cfg.Root, text, p.log)
	default:
		cfg.Secret, err = bootstrap.AskSecret(ctx, cfg.Root)
	}
	if err != nil {
		return fmt.Errorf("register with the scheduler at %s: %w", cfg.Root, err)
	}
	if p.set.TLS {
		cfg.Secret = cfg.Secret.Encrypted()
	}
	return nil
}

// serverAddress sets the address on which a server listens.
func serverAddress(ctx context.Context, set *config.Config, cfg *van.Config) error {
	port := set.Variable("PORT")
	if port == "" {
		port = "0"
	} else if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
		return fmt.Errorf("PORT is %q, want a port, 1 to 65535", port)
	}
	switch s := &set.PS; {
	case s.Local:
		cfg.Host = "127.0.0.1"
	case s.NodeHost != "":
		cfg.Host = s.NodeHost
	default:
		choice, err := netif.Parse(s.Interfaces)
		if err != nil {
			return err
		}
		addr, err := choice.Towards(ctx, cfg.Root)
		if err != nil {
			return err
		}
		cfg.Host = addr.String()
	}
	cfg.Listen = net.JoinHostPort(cfg.Host, port)
	return nil
}

// checkSecret returns an error if other hosts can connect to listen and need no secret for it.
func checkSecret(set *config.Config, listen string, s secret.Secret) error {
	host, _, err := net.SplitHostPort(listen)
	if err != nil || !s.IsZero() || set.Insecure {
		return err
	}
	if a, err := netip.ParseAddr(host); err == nil && a.IsLoopback() || host == "localhost" {
		return nil
	}
	return fmt.Errorf("this node would listen on %s without a secret: set HVD_SECRET_FILE at all nodes, or "+
		"HVD_INSECURE=1 if every process that reaches the port may take part", listen)
}

// Role returns the role of this process.
func (p *postoffice) Role() Role { return Role(p.cfg.Role.String()) }

// IsRecovery reports whether this process has taken the place of one that has ended after its Join. The
// other nodes have passed all barriers that the old process has passed.
func (p *postoffice) IsRecovery() bool { return p.van.IsRecovery() }

// AwaitReturn waits until a node that has ended was started again and has joined the job, or until ctx ends.
// If only the connection with the node has ended, it waits until there is another one. If the node takes part
// in the job and can be reached, AwaitReturn returns at once.
func (p *postoffice) AwaitReturn(ctx context.Context, id NodeID) error {
	if !slices.Contains(p.NodeIDs(AllGroup), id) {
		return &UsageError{fmt.Errorf("ps: wait for a return: the job has no node with the id %d", id)}
	}
	if err := p.van.AwaitReturn(ctx, int(id)); err != nil {
		return fmt.Errorf("ps: wait for the return of %s: %w", id, public(err))
	}
	return nil
}

// NumWorkers returns the number of workers of the job.
func (p *postoffice) NumWorkers() int { return p.cfg.NumWorkers }

// NumServers returns the number of servers of the job.
func (p *postoffice) NumServers() int { return p.cfg.NumServers }

// NodeIDs returns the ids of the nodes of a group: the scheduler, servers by rank, workers by rank. It
// returns nil if there is no such group.
func (p *postoffice) NodeIDs(group NodeID) []NodeID {
	return nodeIDs(van.Members(int(group), p.cfg.NumServers, p.cfg.NumWorkers))
}

// DeadNodes returns the ids of nodes that have died, or that have been silent for the time timeout. At the
// scheduler this concerns all nodes. Another node knows of silence only for the scheduler. During the time
// timeout after the start, silence does not count. If timeout is 0, DeadNodes returns nil.
func (p *postoffice) DeadNodes(timeout time.Duration) []NodeID { return nodeIDs(p.van.Dead(timeout)) }

func nodeIDs(ids []int) (all []NodeID) {
	for _, id := range ids {
		all = append(all, NodeID(id))
	}
	return all
}

// Traffic returns the number of bytes that this process has sent to other nodes and received from them.
func (p *postoffice) Traffic() (sent, received uint64) {
	for _, peer := range p.van.Stats().Peers {
		sent, received = sent+peer.SentBytes, received+peer.ReceivedBytes
	}
	return sent, received
}

// RegisterExitCallback makes Finalize, Close or Fail call f at its end. Functions are called in the order in
// which they were registered. f must not call Finalize or Close of this node, which would wait for f.
func (p *postoffice) RegisterExitCallback(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.exits = append(p.exits, f)
}

// meet calls the function enter, which enters a barrier, for every node of this process at once.
func (p *postoffice) meet(enter func(customer int) error) error {
	errs := make([]error, p.cfg.Customers)
	var wg sync.WaitGroup
	for c := range errs {
		wg.Go(func() { errs[c] = enter(c) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// barrier makes a node of this process enter the barrier of a group, and waits there.
func (p *postoffice) barrier(ctx context.Context, customer, group int) error {
	place := [2]int{customer, group}
	p.mu.Lock()
	if p.waiting[place] {
		p.mu.Unlock()
		return &UsageError{fmt.Errorf("barrier of group %d: another call of this node waits in it", group)}
	}
	p.waiting[place] = true
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.waiting, place)
	}()
	return p.van.Barrier(ctx, customer, group)
}

// meetAll enters the barrier of all nodes. If one has ended, it waits for its return and enters the barrier
// again.
func (p *postoffice) meetAll(ctx context.Context, customer int) error {
	for {
		err := p.barrier(ctx, customer, van.GroupAll)
		gone, ok := errors.AsType[*van.NodeError](err)
		if !ok || p.set.PS.Recovery == 0 {
			return err
		}
		wait, cancel := context.WithTimeout(ctx, p.set.PS.Recovery)
		returned := p.van.AwaitReturn(wait, gone.ID)
		cancel()
		if other, ok := errors.AsType[*van.NodeError](returned); ok && other.ID != gone.ID {
			return returned // for example, the scheduler has ended meanwhile
		}
		if returned != nil {
			return err // it says which node is missing
		}
	}
}

// Finalize waits for all other nodes of the job at a barrier, and then leaves the job. In the synchronous
// modes (Clock), it first waits until the pushes and pulls of this process have completed. If a node has
// ended, Finalize waits HVD_RECOVERY_SECONDS for its return. If the barrier fails, this process leaves the
// job nevertheless, and Finalize returns the error.
//
// Requests of this process that are not answered fail when it leaves. Then Finalize calls the exit callbacks.
// If Finalize, Close or Fail was called before, Finalize waits until that call has ended, and returns nil.
//
// Finalize waits until no handler and no callback of this process runs. So they must not call it. They may
// call Fail.
func (p *postoffice) Finalize(ctx context.Context) error { return p.finalize(ctx, true) }

// Close leaves the job without waiting for the other nodes. Otherwise it is like Finalize. After Finalize,
// Close or Fail, it only waits until that call has ended, so a program can defer it. It returns nil.
func (p *postoffice) Close() error { return p.finalize(context.Background(), false) }

func (p *postoffice) finalize(ctx context.Context, barrier bool) (err error) {
	p.mu.Lock()
	ended, first := p.finalized, p.finalized == nil
	if first {
		ended = make(chan struct{})
		p.finalized = ended
	}
	p.mu.Unlock()
	if !first {
		<-ended
		return nil
	}
	defer close(ended)
	if barrier {
		p.settle(ctx)
	}
	p.endClocks()
	if barrier {
		p.van.Finish()
		if err = p.meet(func(c int) error { return p.meetAll(ctx, c) }); err != nil {
			err = fmt.Errorf("ps: finalize: %w", public(err))
		}
	}
	p.stop()
	p.mu.Lock()
	exits := p.exits
	p.mu.Unlock()
	for _, f := range exits {
		f()
	}
	return err
}

// Fail leaves the job because the program of this node has failed. Requests and barriers of other nodes that
// need this node fail with the reason, such as "its program raised ValueError: no data", which hvdrun reports
// too. Fail also ends a Finalize in progress. After Finalize or Close it does nothing.
//
// Fail waits for at most 5 s until this process has left the job, so a handler or a callback may call it. The
// process leaves when they have returned. The other nodes learn the reason at once.
func (p *postoffice) Fail(reason string) {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	left := make(chan struct{})
	go func() { // Close waits for it
		defer close(left)
		p.freeAddress()
		p.van.Fail(ctx, cmp.Or(reason, "it has failed"))
		_ = p.Close()
	}()
	select {
	case <-left:
	case <-ctx.Done():
	}
}

// stop leaves the job and ends all requests.
func (p *postoffice) stop() {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	p.mu.Lock()
	customers := p.list()
	p.mu.Unlock()
	for _, c := range customers {
		c.closeReplicas()
	}
	p.freeAddress()
	p.van.Stop(ctx)
	p.mu.Lock()
	customers = p.list()
	for _, h := range p.held {
		h.m.Release()
	}
	p.held, p.heldBytes = nil, 0
	p.mu.Unlock()
	for _, c := range customers {
		c.failAll(ErrFinalized)
	}
	p.wg.Wait()
	p.reportPushes()
	p.stopObserving()
	p.report()
	reporting, reported := context.WithTimeout(context.Background(), blameTime)
	p.reportState(reporting, true) // before awaitDump, because hvdrun must learn it if the file system hangs
	reported()
	p.awaitDump(ctx)
	p.closeLauncher()
	if p.metrics != nil {
		_ = p.metrics.Close() // a scrape in progress may fail
	}
}

// awaitDump waits until the last dump is written, or until ctx ends.
func (p *postoffice) awaitDump(ctx context.Context) {
	p.mu.Lock()
	dumped := p.dumped
	p.mu.Unlock()
	if dumped != nil {
		select {
		case <-dumped:
		case <-ctx.Done():
		}
	}
}

// freeAddress makes room for the scheduler of the next job while this one leaves. A process that connects
// with that one must not get this job's secret.
func (p *postoffice) freeAddress() {
	p.van.StopListening() // first: at a scheduler that listens and offers no secret, processes give up
	p.closeOffer()
}

// closeOffer stops offering the secret to other nodes. Further calls do nothing.
func (p *postoffice) closeOffer() {
	if p.stopOffer != nil {
		_ = p.stopOffer() // only a node that would come too late is affected
	}
}

// list returns all customers. The caller holds mu.
func (p *postoffice) list() (all []*customer) {
	for _, c := range p.customers {
		all = append(all, c)
	}
	return all
}

// router passes what the van receives to the customers of a postoffice. It implements van.Handler.
type router struct{ *postoffice }

// Receive passes a message to its customer.
func (p router) Receive(from van.Process, m *van.Message) {
	h := m.Header
	p.mu.Lock()
	c := p.customers[customerKey{int(h.AppId), int(h.CustomerId)}]
	if c == nil && h.Request {
		c = p.customers[customerKey{int(h.AppId), 0}]
	}
	if c != nil {
		p.mu.Unlock()
		c.receive(from, m)
		return
	}
	n, waiting, request := m.Size(), len(p.held), h.Request
	full := waiting == maxHeld || p.heldBytes > 0 && p.heldBytes+n > maxHeldBytes
	if request && !full {
		p.held = append(p.held, held{from, m, n, time.Now()})
		p.heldBytes += n
	}
	p.mu.Unlock() // from now on m may be handled and released, if it waits
	switch {
	case !request:
		m.Release() // the customer has gone
	case full:
		p.refuse(from, m, fmt.Errorf("it has no app %d yet, and %d messages wait for their apps", h.AppId,
			waiting))
	}
}

// refuse answers a request with an error.
func (p *postoffice) refuse(from van.Process, m *van.Message, err error) {
	h := m.Header
	refusal := &van.Message{Header: &pspb.Header{AppId: h.AppId, CustomerId: h.CustomerId,
		Timestamp: h.Timestamp, Range: h.Range, Replica: h.Replica, SimpleApp: h.SimpleApp,
		Error: err.Error()}}
	m.Release()
	p.sendAnswer(from, refusal)
}

// respond sends the response m. If m is too long to be sent, the request fails.
func (p *postoffice) respond(to van.Process, m *van.Message) error {
	err := p.van.Reply(to, m)
	if _, tooLong := errors.AsType[*van.LimitError](err); tooLong {
		p.refuse(to, m, err)
	}
	return err
}

// sendAnswer sends a response. If the node that has asked is gone, nobody needs the response.
func (p *postoffice) sendAnswer(to van.Process, m *van.Message) {
	if err := p.van.Reply(to, m); err != nil {
		p.log.Debug("ps: a response was not sent", zap.Error(err))
	}
}

// checkNew returns an error if this node can have no further customer with the given key.
func (p *postoffice) checkNew(key customerKey) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.checkNewLocked(key)
}

// checkNewLocked does what checkNew does. The caller holds mu.
func (p *postoffice) checkNewLocked(key customerKey) error {
	if p.finalized != nil {
		return ErrFinalized
	}
	if p.customers[key] != nil {
		return &UsageError{fmt.Errorf("app %d has a customer %d already", key.app, key.id)}
	}
	return nil
}

// addCustomer registers a customer and passes it the messages that wait for it.
func (p *postoffice) addCustomer(c *customer) error {
	// Messages that arrive from now on wait for handling, so they do not overtake those that wait already.
	c.handling.Lock()
	defer c.handling.Unlock()
	p.mu.Lock()
	if err := p.checkNewLocked(c.key); err != nil {
		p.mu.Unlock()
		return err
	}
	p.customers[c.key] = c
	var mine, others []held
	for _, h := range p.held {
		if int(h.m.Header.AppId) == c.key.app && (c.key.id == 0 || int(h.m.Header.CustomerId) == c.key.id) {
			mine = append(mine, h)
			p.heldBytes -= h.bytes
		} else {
			others = append(others, h)
		}
	}
	p.held = others
	p.mu.Unlock()
	for _, h := range mine {
		c.handle(h.from, h.m)
	}
	return nil
}

// Lost fails the requests to a node.
func (p router) Lost(id int, err error) {
	p.mu.Lock()
	customers := p.list()
	p.mu.Unlock()
	for _, c := range customers {
		c.lost(id, err)
	}
}

// News tells the customers that processes or connections have changed.
func (p router) News() {
	p.mu.Lock()
	customers := p.list()
	p.mu.Unlock()
	for _, c := range customers {
		c.news()
	}
}

// Tick fails what has waited for too long.
func (p router) Tick(now time.Time) {
	p.mu.Lock()
	customers := p.list()
	late := p.held[:0:0]
	for len(p.held) > 0 && now.Sub(p.held[0].since) > customerWait {
		late = append(late, p.held[0])
		p.heldBytes -= p.held[0].bytes
		p.held = p.held[1:]
	}
	p.mu.Unlock()
	for _, h := range late {
		p.refuse(h.from, h.m, fmt.Errorf("it has had no app %d for %v", h.m.Header.AppId, customerWait))
	}
	for _, c := range customers {
		c.tick(now)
	}
}
