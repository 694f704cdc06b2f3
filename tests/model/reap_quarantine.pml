/* reap_quarantine.pml -- attachments, holds, reaping, quarantine, and the fence.
 *
 *   step here             function in native/
 *   claim                 core/attach.c slot_claim; not one step, so that others see it half done
 *   allocate              core/chunks.c block_new; evicts as evict_one does
 *   publish, abort        core/chunks.c publish; let_go of a write hold
 *   fence                 core/attach.h slot_mine, asked by every locked call
 *   reap_slot             api.c reap_slot: peek, judge; then under the lock:
 *   condemn, drop_one     core/attach.c slot_condemn, slot_empty_step; also of its own slot: api.c shmc_detach
 *   note_leaving          api.c note_leaving
 *   os[p]                 what os/linux.c shmc_liveness says of a process: alive, exec'ed or dying, gone
 *
 * Other transactions are single steps here: lock_journal.pml shows that they may be. A process may die
 * between any two (DEATHS in all). It may pass through a moment that looks exec'ed, in which its GPU
 * still writes; or it exec's, and lives on like that. Three workers want the one block; two of them
 * reap before they attach, so that two reapers meet.
 * Shown: the block has one owner; it is not used again while its writer may still write or while
 * somebody holds it; nobody alive is cleared away; of the dead, all holds and unpublished blocks come
 * back, whoever dies while reaping; a reaper always ends. With -DWRONG_JUDGEMENT one living process is
 * taken for dead: then it harms nobody. With -DHALF_READ others may claim a slot while its first words are read.
 */
#ifndef DEATHS
#define DEATHS 2
#endif
#define SLOTS 2
#define NONE 9
#define DEAD 8                          /* lock: its owner died inside a claim */
mtype = { ALIVE, EXECED, GONE, FREE, LIVE, QUARANTINE, REAPING, WRITING, PUBLISHED };

mtype os[3] = ALIVE;
bool dma[3];                            /* its GPU may be writing to the block */
byte deaths, ended;
bool lied;

byte lock = NONE, claiming;
mtype state[SLOTS] = FREE;              /* the attachment table */
byte gen[SLOTS], who[SLOTS];            /* who: pid and start time, which are compared together */
byte leaving[SLOTS];                    /* the generation whose owner closed it and could not get the lock */
bool hold[SLOTS], write[SLOTS];         /* its hold on the published, or on the unpublished block */
mtype block = FREE;
byte version;                           /* moves when the block is given to a writer */

#define MAY_DIE :: deaths < DEATHS -> deaths++; goto dies

/* The next owner of the lock undoes a half-done claim: core/lock.c recover. It reaps nothing. */
inline recover() {
    if
    :: lock == DEAD -> state[claiming] = FREE; gen[claiming]--; lock = NONE
    :: else
    fi
}
/* One transaction under the lock; or death. */
#define TX(x) atomic { if :: lock == NONE || lock == DEAD -> recover(); x MAY_DIE fi }

#define LIVES_AS(s, g) (state[s] == LIVE && gen[s] == g)
#ifdef BUG_NO_FENCE
#define FENCED(s, x) x
#else
#define FENCED(s, x) if :: LIVES_AS(s, mygen) -> x :: else -> mine = false fi
#endif

inline let_go_write(s) {
    assert(block == WRITING);
    block = FREE;
    write[s] = false
}

inline allocate(me, s) {
    if
    :: block == FREE || (block == PUBLISHED && !hold[0] && !hold[1]) ->
        assert(lied || !(dma[0] || dma[1] || dma[2]));
        assert(!write[0] && !write[1] && !hold[0] && !hold[1]);
        block = WRITING; version++; v = version;
        write[s] = true; mine = true; dma[me] = true
    :: else
    fi
}

inline publish(s) {
    assert(block == WRITING && write[s] && version == v);
    block = PUBLISHED; write[s] = false; hold[s] = true
}

inline condemn(i) {
    if
    :: state[i] == FREE || gen[i] != g -> more = false
#ifndef BUG_GENERATION_ALONE
    :: state[i] != FREE && gen[i] == g && who[i] != w -> more = false
    :: state[i] != FREE && gen[i] == g && who[i] == w ->
#else
    :: state[i] != FREE && gen[i] == g ->
#endif
        if
        :: state[i] == REAPING
#ifndef BUG_STATE_NOT_COMPARED
        :: state[i] != REAPING && st == REAPING -> more = false     /* half of it was read of another time */
        :: state[i] != REAPING && st != REAPING ->
#else
        :: else ->
#endif
            state[i] = (judged == GONE -> REAPING : QUARANTINE)
        fi
    fi
}

inline drop_one(i) {
    if
#ifdef BUG_SLOT_FIRST
    :: state[i] == REAPING -> state[i] = FREE; gen[i]++; more = false
#else
    :: state[i] == REAPING && !hold[i] && !write[i] -> state[i] = FREE; gen[i]++; more = false
    :: state[i] == REAPING && !hold[i] && write[i] -> let_go_write(i)
    :: state[i] == REAPING && hold[i] -> hold[i] = false
#endif
    :: state[i] == QUARANTINE && hold[i] -> hold[i] = false
    :: state[i] == QUARANTINE && !hold[i] -> more = false
    fi
}

/* Only ever forward: the slot may be another's by now, who has left too. */
inline note_leaving(i) {
#ifdef BUG_NOTE_GOES_BACK
    leaving[i] = mygen
#else
    atomic { leaving[i] = (leaving[i] < mygen -> mygen : leaving[i]) }
#endif
}

/* One slot as others see it: what is read without the lock may be half done. */
inline reap_slot(i) {
#ifdef HALF_READ
    st = state[i];
    g = gen[i];
#else
    atomic { st = state[i]; g = gen[i] };
#endif
    if
    :: st != FREE ->
        atomic {
            w = who[i];
#ifdef BUG_LEAVING_OF_ANY_TIME
            judged = (st == REAPING || leaving[i] -> GONE : os[w]);
#else
            judged = (st == REAPING || leaving[i] == g -> GONE : os[w]);
#endif
#ifdef BUG_NO_QUARANTINE
            judged = (judged == EXECED -> GONE : judged);
#endif
#ifdef WRONG_JUDGEMENT
            if :: judged == ALIVE && !lied -> lied = true; judged = GONE :: true fi;
#endif
            more = !(judged == ALIVE || (judged == EXECED && st == QUARANTINE));
#ifdef BUG_HALF_REAPED_IS_LEFT
            more = more && st != REAPING
#endif
        };
        do
        :: more -> TX(condemn(i); if :: more -> drop_one(i) :: else fi)
        :: !more -> break
        od
    :: else
    fi;
    atomic { st = 0; judged = 0; g = 0; w = 0 }
}

inline reap() { reap_slot(0); reap_slot(1) }

proctype worker(byte me; bool reaps) {
    byte s, mygen, v;
    mtype st, judged;
    byte g, w;
    bool more, mine, attached;

    if :: reaps -> reap() :: else fi;

    TX(lock = me;
       s = (state[0] == FREE -> 0 : (state[1] == FREE -> 1 : NONE));
       if
       :: s == NONE -> lock = NONE; goto done       /* the table is full */
       :: else -> claiming = s; gen[s]++; mygen = gen[s]; who[s] = me; state[s] = LIVE
       fi);
    atomic { if :: lock = NONE; attached = true MAY_DIE fi };        /* committed, or died inside */

    TX(FENCED(s, allocate(me, s)));
    if
    :: mine ->
        if
        :: dma[me] = false; TX(FENCED(s, publish(s)));      /* a put comes after the copy that writes */
            atomic { assert(!LIVES_AS(s, mygen) || (block == PUBLISHED && version == v)) };    /* it reads */
            if :: TX(FENCED(s, hold[s] = false)) :: me == 0 fi      /* or left to shmc_detach */
        :: dma[me] = false; TX(FENCED(s, let_go_write(s)))
        MAY_DIE
        fi
    :: else
    fi;
    assert(lied || LIVES_AS(s, mygen));
    atomic { judged = GONE; g = mygen; w = me; more = true };
    do
    :: more -> TX(condemn(s); if :: more -> drop_one(s) :: else fi)
    :: more -> note_leaving(s); goto done       /* LockTimeoutError: whoever reaps next does the rest */
    :: !more -> break
    od;
    goto done;

dies:
    atomic {
#ifdef BUG_REAP_IN_RECOVERY
        if :: attached && LIVES_AS(s, mygen) && write[s] -> let_go_write(s) :: else fi;
#endif
        if :: lock == me -> lock = DEAD :: else fi;
        if :: os[me] = EXECED :: skip fi
    };
    if
    :: os[me] == EXECED -> goto done        /* another program now, that lives on */
    :: atomic { os[me] = GONE; dma[me] = false }
    fi;
done:
    ended++
}

/* The next to attach when all is quiet: everything the dead had is back. */
init {
    mtype st, judged;
    byte g, w, i;
    bool more;

    atomic { run worker(0, false); run worker(1, true); run worker(2, true) };
    atomic { ended == 3; deaths = DEATHS };
    reap();
dies:
    do
    :: i < SLOTS ->
        atomic {
            assert(!hold[i]);
            assert(state[i] == FREE || (state[i] == QUARANTINE && os[who[i]] == EXECED));
            assert(state[i] == QUARANTINE || !write[i])
        };
        i++
    :: else -> break
    od;
    assert(block != WRITING || write[0] || write[1])
}
