"""Script of the HTML picture, for pointing and zooming; kept small, as the style is."""

SCRIPT = """
(()=>{const root=document.currentScript.parentElement,tip=root.querySelector('.om-tip');root.classList.add('om-live');
root.querySelectorAll('[title]').forEach(e=>{e.dataset.tip=e.title;e.removeAttribute('title')});
root.querySelectorAll('rect>title').forEach(e=>{e.parentNode.dataset.tip=e.textContent;e.remove()});
const put=e=>{tip.hidden=false;const r=tip.getBoundingClientRect();
tip.style.left=Math.max(4,Math.min(e.clientX+14,innerWidth-r.width-6))+'px';
tip.style.top=(e.clientY+18+r.height>innerHeight?e.clientY-r.height-12:e.clientY+18)+'px'};
const size=b=>{for(const[u,n]of[[2**40,'TiB'],[2**30,'GiB'],[2**20,'MiB'],[2**10,'KiB']])
if(b>=u)return(b/u).toPrecision(b/u>=1000?4:3)+' '+n;return b+' B'};
const time=s=>s>=1?s.toPrecision(4)+' s':s>=1e-3?(s*1e3).toPrecision(4)+' ms':(s*1e6).toPrecision(4)+' µs';
const row=(t,a,b)=>{const r=t.insertRow();r.insertCell().textContent=a;r.insertCell().textContent=b};
root.querySelectorAll('.om-data').forEach((d,i)=>{const data=JSON.parse(d.textContent),m=data.moments,
mem=root.querySelectorAll('.om-scroll .om-mem')[i],hair=mem.querySelector('.om-hair');
mem.addEventListener('mousemove',e=>{const r=mem.getBoundingClientRect(),x=(e.clientX-r.left)/r.width*data.columns;
let a=0,b=m.length-1;while(a<b){const c=(a+b+1)>>1;m[c][0]<=x?a=c:b=c-1}
const v=m[a].slice(2),t=document.createElement('table');
row(t,'at '+time(x/data.columns*data.end_s),size(v.reduce((p,q)=>p+q,0)));
for(let k=v.length-1;k>=0;k--)if(v[k])row(t,data.kinds[k],size(v[k]));
row(t,m[a][1],'');
tip.replaceChildren(t);hair.hidden=false;hair.style.left=(e.clientX-r.left)+'px';put(e);e.stopPropagation()});
mem.addEventListener('mouseleave',()=>{hair.hidden=true;tip.hidden=true})});
root.addEventListener('mousemove',e=>{const b=e.target.closest('[data-tip]');
if(!b){tip.hidden=true;return}tip.textContent=b.dataset.tip;put(e)});
root.addEventListener('mouseleave',()=>{tip.hidden=true});
const scrolls=[...root.querySelectorAll('.om-scroll')],buttons=root.querySelectorAll('[data-zoom]');let zoomed=1;
const marks=()=>root.querySelectorAll('.om-axis[data-end]').forEach(axis=>{const end=+axis.dataset.end,
rough=end/(8*zoomed),ten=10**Math.floor(Math.log10(rough)),step=[1,2,5,10].find(f=>f*ten>=rough*.999)*ten,
[unit,name]=end>=1?[1,'s']:end>=1e-3?[1e-3,'ms']:[1e-6,'µs'],n=end>0?Math.floor(end/step+1e-9)+1:0,
apart=(axis.offsetWidth||1e9)*step/end,every=[1,2,5].find(k=>k*apart>=48)||10;
axis.replaceChildren(...Array.from({length:Math.ceil(n/every)},(_,k)=>{const i=k*every,
mark=document.createElement('span');mark.style.left=100*i*step/end+'%';
if(i&&(end-i*step)/end*axis.offsetWidth<20)mark.style.transform='translateX(-100%)';
mark.textContent=+(i*step/unit).toPrecision(9)+' '+name;return mark}))});
const zoom=(z,at=.5,held=.5)=>{z=Math.min(64,Math.max(1,z));
const changed=z!==zoomed;zoomed=z;
buttons.forEach(b=>b.classList.toggle('on',Math.abs(b.dataset.zoom-z)<.01));
scrolls.forEach(s=>{const w=s.firstElementChild;w.style.width=100*z+'%';
s.scrollLeft=at*w.offsetWidth-held*s.clientWidth});if(changed)marks()};
const middle=()=>{const s=scrolls[0];return(s.scrollLeft+s.clientWidth/2)/s.firstElementChild.offsetWidth};
buttons.forEach(b=>b.addEventListener('click',()=>zoom(+b.dataset.zoom,middle())));
let pageMoved=0;addEventListener('scroll',()=>{pageMoved=Date.now()},{passive:true});
scrolls.forEach(s=>{const w=s.firstElementChild,at=x=>(x-w.getBoundingClientRect().left)/w.offsetWidth;
s.addEventListener('scroll',()=>scrolls.forEach(o=>{if(o.scrollLeft!==s.scrollLeft)o.scrollLeft=s.scrollLeft}));
s.addEventListener('wheel',e=>{if(Math.abs(e.deltaX)>Math.abs(e.deltaY)||e.shiftKey)return;
const z=zoomed*Math.exp(-e.deltaY*(e.deltaMode?.05:.002));
if(Date.now()-pageMoved<250||(zoomed===1&&z<1)||(zoomed===64&&z>64))return;
e.preventDefault();zoom(z,at(e.clientX),(e.clientX-s.getBoundingClientRect().left)/s.clientWidth)},{passive:false});
s.addEventListener('pointerdown',e=>{if(e.pointerType==='touch'||e.button)return;
if(e.clientY>s.getBoundingClientRect().top+s.clientHeight)return;
const from=at(e.clientX),x=e.clientX,left=s.scrollLeft,moves=e.shiftKey,mark=document.createElement('i');
mark.className='om-mark';if(!moves)w.append(mark);
const span=f=>{const a=Math.max(0,Math.min(from,at(f.clientX))),b=Math.min(1,Math.max(from,at(f.clientX)));return[a,b]};
const move=f=>{if(moves){s.scrollLeft=left-(f.clientX-x);return}const[a,b]=span(f);
mark.style.left=100*a+'%';mark.style.width=100*(b-a)+'%'};
const end=f=>{removeEventListener('pointermove',move);removeEventListener('pointerup',end);
removeEventListener('pointercancel',end);mark.remove();
if(!moves&&f.type==='pointerup'&&Math.abs(f.clientX-x)>4){const[a,b]=span(f);zoom(1/(b-a),(a+b)/2)}};
addEventListener('pointermove',move);addEventListener('pointerup',end);addEventListener('pointercancel',end)});
s.addEventListener('dblclick',()=>zoom(1));
s.addEventListener('keydown',e=>{const to={'+':zoomed*2,'=':zoomed*2,'-':zoomed/2,'0':1}[e.key];
if(to&&!e.ctrlKey&&!e.metaKey){e.preventDefault();zoom(to,middle())}})});zoom(1,0,0);
marks();addEventListener('resize',marks)})()
""".strip()
